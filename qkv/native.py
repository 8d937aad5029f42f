"""The compiled kernels: where the library is, how it is loaded, and the structures that it takes.

Nothing is loaded on import. :func:`library` loads on first use and returns None when there is nothing to load; the
reason is in :func:`status`. The structures mirror ``csrc/abi.h``; their sizes are compared at load time.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

SCALE_NONE, SCALE_TOKEN, SCALE_HEAD, SCALE_GROUP, SCALE_CHANNEL = 0, 1, 2, 3, 4
SCALE_KINDS = {"token": SCALE_TOKEN, "head": SCALE_HEAD, "group": SCALE_GROUP, "channel": SCALE_CHANNEL}
# Types of stored scales are numbered in formats/scale_types.py; a scale per head is a float32.
SCALE_F32 = 4
OFFSETS = {None: 0, "zero_point": 1, "bfloat16": 2, "middle": 3}
MASK_NONE, MASK_BOOL, MASK_F32 = 0, 1, 2

# Ids of QkvFormat for unquantized rows; the quantized formats name their own.
FLOAT_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class SlowPathWarning(UserWarning):
    """Something correct but slow is serving, and what would make it fast; given once for each cause."""


class Plane(Structure):
    """``QkvPlane``: the codes and scales of the keys, or of the values, of a run of tokens."""

    _fields_ = [
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("table", c_void_p),
        ("bound", c_void_p),
        ("below", c_void_p),
        ("above", c_void_p),
        ("signs", c_void_p),
        ("centre", c_void_p),
        ("multiplier", c_void_p),
        ("codes_stride", c_int64 * 2),
        ("scale_stride", c_int64 * 2),
        ("group_stride", c_int64),
        ("format", c_int32),
        ("scale_kind", c_int32),
        ("scale_type", c_int32),
        ("offset_type", c_int32),
        ("group", c_int32),
        ("rotation", c_int32),
        ("cut", c_float),
        ("reserved", c_int32),
    ]


class Region(Structure):
    """``QkvRegion``: a run of tokens stored in one format; the first ``skip`` tokens of the planes are not seen."""

    _fields_ = [("key", Plane), ("value", Plane), ("skip", c_int64), ("length", c_int64)]


class Attend(Structure):
    """``QkvAttend``: everything that one call of the attention kernel needs."""

    _fields_ = [
        ("query", c_void_p),
        ("out", c_void_p),
        ("mask", c_void_p),
        ("sinks", c_void_p),
        ("regions", c_void_p),
        ("query_stride", c_int64 * 3),
        ("mask_stride", c_int64 * 4),
        ("batch", c_int64),
        ("kv_heads", c_int64),
        ("group", c_int64),
        ("q_len", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("n_regions", c_int64),
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("query_dtype", c_int32),
        ("mask_kind", c_int32),
        ("causal", c_int32),
        ("threads", c_int32),
    ]


class Rows(Structure):
    """``QkvRows``: rows of floats to be encoded, or to be decoded into."""

    _fields_ = [
        ("rows", c_void_p),
        ("stride", c_int64 * 3),
        ("dim", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class Append(Structure):
    """``QkvAppend``: one token's keys and values for one segment."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("offset", c_int64),
        ("batch", c_int64),
        ("heads", c_int64),
        ("key_rows", Rows),
        ("value_rows", Rows),
        ("key", Plane),
        ("value", Plane),
    ]


_tables: dict[tuple[float, ...], Any] = {}


def table(values: tuple[float, ...]) -> int:
    """The address of a code book as float32, for as long as the process lives."""
    if values not in _tables:
        _tables[values] = (c_float * len(values))(*values)
    return ctypes.addressof(_tables[values])


_library: ctypes.CDLL | None = None
_status: str | None = None  # why there is no library, or the instruction set; None: not tried yet


def _share_openmp() -> None:
    """Makes the OpenMP runtime that torch uses visible to our library, so that both share one pool of threads.

    Our library is linked against no OpenMP runtime: wheels of torch carry theirs under different names, and a second
    runtime would keep a second pool spinning. Whatever runtime is loaded already serves; GCC's interface is offered
    by libgomp and by LLVM's and Intel's runtimes.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
        loaded = {line.split()[-1] for line in maps.splitlines() if len(line.split()) > 5}
    except OSError:
        loaded = set()
    names = ("libgomp", "libomp", "libiomp5")
    found = [path for name in names for path in sorted(loaded) if Path(path).name.startswith(name)]
    for candidate in [*found, "libgomp.so.1"]:
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue


def _load() -> tuple[ctypes.CDLL | None, str]:
    wanted = os.environ.get("QKV_KERNELS", "auto")
    if wanted == "off":
        return None, "switched off by QKV_KERNELS=off"
    folder = Path(__file__).parent
    files = sorted(p for p in folder.glob("_kernels*") if p.suffix in (".so", ".pyd", ".dylib"))
    if not files and (folder.parent / "setup.py").exists():
        return None, f"{folder} is the source folder, and nothing is built in it; run: pip install -e {folder.parent}"
    if not files:
        return None, "the C++ kernels were not built: there was no C++ compiler when qkv was installed"
    _share_openmp()
    try:
        lib = ctypes.CDLL(str(files[0]))
        lib.qkv_abi.restype = c_int64
        sizes = [ctypes.sizeof(kind) for kind in (Plane, Region, Attend, Rows)]
        if lib.qkv_abi() != sum(size << (16 * i) for i, size in enumerate(sizes)):
            return None, f"{files[0].name} was built from other sources than this qkv; install qkv again"
    except (OSError, AttributeError) as error:
        return None, f"{files[0].name} does not load: {error}"
    lib.qkv_isa.restype = c_char_p
    lib.qkv_select.argtypes = [c_char_p]
    lib.qkv_attend.argtypes = [POINTER(Attend)]
    lib.qkv_append.argtypes = [POINTER(Append)]
    codec: list[Any] = [POINTER(Rows), POINTER(Plane), c_int32, c_int64, c_int64, c_int64, c_int64, c_int32]
    lib.qkv_encode.argtypes = codec
    lib.qkv_decode.argtypes = codec
    if wanted != "auto" and lib.qkv_select(wanted.encode()) != 0:
        return None, f"QKV_KERNELS={wanted}: this build or processor has no such kernels; use auto, portable or off"
    return lib, lib.qkv_isa().decode()


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None; loads them on the first call and warns once if they should be there and are not."""
    global _library, _status
    if _status is None:
        _library, _status = _load()
        if _library is None and os.environ.get("QKV_KERNELS") != "off":
            warnings.warn(
                f"qkv runs without its compiled kernels, correct but slower: {_status}", SlowPathWarning, stacklevel=3
            )
    return _library


def status() -> str:
    """The instruction set that serves (``avx512``, ``avx2``, ``neon`` or ``portable``), or why none does."""
    library()
    assert _status is not None
    return _status


def select(isa: str) -> None:
    """Makes the kernels use one instruction set; for tests and measurements.

    Args:
        isa: ``avx512``, ``avx2``, ``neon`` or ``portable``.

    Raises:
        ValueError: this processor or this build does not have it.
    """
    global _status
    lib = library()
    if lib is None or lib.qkv_select(isa.encode()) != 0:
        raise ValueError(f"kernels for {isa!r} cannot be used here; in use: {status()}")
    _status = isa
