"""qkv_eval: what a cache format does to a model, and what it saves.

It uses only the public names of qkv, and measures any transformers ``Cache``, not only ours.

- ``text``: the text to score, cut into windows
- ``faithful``: whether one pass through a cache sees what it stores
- ``perplexity``, ``divergence``: scores of a text through a cache, against the unquantized cache
- ``calibrate``: scales from a text; ``tune``, ``tune_costs``, ``tune_solve``: formats layer by layer under a budget
- ``ppl``, ``lm``, ``recall``, ``layers``: the evaluations of ``qkv eval``; ``sweep`` runs many, and goes on after
  a kill
- ``report``: one page of charts and tables out of results
- ``peers``: the caches of one run
- ``held``: the bytes that a cache really holds
- ``bench.decode``, ``bench.kernel``: time of a decode step, time of attention alone
- ``compare``: quality, memory and speed in one table
- ``commands``, ``cli_*``: the commands
"""
