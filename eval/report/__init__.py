"""``qkv report``: results as one page that needs no network and runs no script.

- ``load``: results files, and what kind each row is of
- ``drawing``: SVG whose colours the page chooses, by matplotlib
- ``series``, ``charts``, ``heat``: what drawings are made of, and the kinds of them
- ``panel``, ``quality_panels``, ``layer_panels``, ``cost_panels``: what is drawn from which rows; ``panels``: all of it
- ``tables``: what is written from them
- ``page``: all of it as HTML, from ``page.html`` and ``page.css``

matplotlib, because its SVG is small, prints sharply and needs no script: with a library that draws in the browser the
page would carry megabytes of it, and be blank where scripts are off.
"""

from qkv_eval.report.load import load_runs
from qkv_eval.report.page import build_page, write_page

__all__ = ["build_page", "load_runs", "write_page"]
