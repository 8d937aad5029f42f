"""Which compiled kernels this machine has, and how tests switch between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qkv import native


def _instruction_sets() -> list[str]:
    if native.library() is None:
        return []
    before, found = native.status(), []
    for isa in ("avx512", "avx2", "neon", "portable"):
        try:
            native.select(isa)
        except ValueError:
            continue
        found.append(isa)
    native.select(before)
    return found


INSTRUCTION_SETS = _instruction_sets()
needs_kernels = pytest.mark.skipif(not INSTRUCTION_SETS, reason=f"no compiled kernels: {native.status()}")
# For `@pytest.mark.parametrize`: every instruction set, or one skipped test that says why there is none.
each_instruction_set = pytest.mark.parametrize(
    "isa", INSTRUCTION_SETS or [pytest.param("none", marks=pytest.mark.skip(reason="no compiled kernels"))]
)


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Serves with one instruction set; ``none``: as if nothing had been compiled."""
    if isa == "none":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            patch.setattr(native, "_status", "switched off by a test")
            yield
        return
    before = native.status()
    native.select(isa)
    try:
        yield
    finally:
        native.select(before)
