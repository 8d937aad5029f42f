"""The kernels for AArch64: cross-compiled by setup.py, run by an emulator, and held against those of this machine.

Codes, scales and what they are decoded to are the same, bit for bit. Attention adds up in another order and its
exponentials differ in the last bits, which now and then moves what is rounded to 16 bits by a step. So it may be off by
two parts in a hundred thousand, as root mean square over the output; codes with a zero point meet that rounding three
times as large, as between the kernels of one machine. Outputs in bfloat16 may be off by their own rounding besides.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from emulated import Emulated, build, program, zig
from instruction_sets import needs_kernels
from setups import SETUPS, fits
from stores import assert_same, bits, filled, kv

from qkv import native
from qkv.attention import cpu
from qkv.config import CacheConfig
from qkv.formats import get_format
from qkv.view import KVView

MISSING = [tool for tool in ("ziglang", "unicorn") if importlib.util.find_spec(tool) is None]
pytestmark = [
    needs_kernels,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install 'qkv[arm]'"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator maps memory as Linux lists it"),
]
each_setup = pytest.mark.parametrize("setup", SETUPS)
# Batch, kv heads, query heads for each, queries, tokens, key channels, value channels.
SHAPES = [
    (2, 2, 3, 1, 97, 64, 64),
    (1, 1, 7, 3, 300, 96, 32),
    (1, 2, 1, 2, 257, 32, 64),
    (1, 1, 2, 2, 40, 7, 19),
    (1, 2, 1, 1, 20, 1, 1),
    (2, 1, 5, 1, 31, 24, 50),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library was built."""
    folder = tmp_path_factory.mktemp("aarch64")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def emulated(folder: Path) -> Emulated:
    return Emulated(program(folder))


@contextmanager
def serving(emulated: Emulated, isa: str) -> Iterator[None]:
    """Within, the library is the emulated one, and is called."""
    assert emulated.qkv_select(isa.encode()) == 0
    before = emulated.calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: emulated)
        yield
    assert emulated.calls > before


def test_the_library_is_one_for_aarch64_and_begins_with_neon(folder: Path, emulated: Emulated) -> None:
    (library,) = (folder / "library").rglob("_kernels*")
    assert library.read_bytes()[18:20] == b"\xb7\x00"  # the number of the processor, in an ELF file
    lib, fresh = native.library(), Emulated(folder / "program")
    assert lib is not None
    assert fresh.qkv_isa() == b"neon"
    assert fresh.qkv_abi() == lib.qkv_abi()
    assert fresh.qkv_select(b"avx2") == -1
    assert fresh.qkv_select(b"portable") == 0
    assert fresh.qkv_isa() == b"portable"


def test_a_compiler_for_macos_takes_the_sources(folder: Path) -> None:
    flags = ["-std=c++17", "-DQKV_ARM64", "-fno-lax-vector-conversions", "-c"]
    for name in ("dispatch", "kernels_neon", "kernels_portable"):
        zig(folder, "aarch64-macos", *flags, f"qkv/csrc/{name}.cpp", "-o", f"{name}.macos.o")


@each_setup
def test_codes_and_what_they_are_decoded_to_are_the_same_bits(emulated: Emulated, setup: str) -> None:
    for isa, dtype in (("neon", torch.float32), ("neon", torch.bfloat16), ("portable", torch.float16)):
        keys, values = (x.to(dtype) for x in kv(53, key_dim=32, value_dim=64, growing=6))
        keys[0, 1, 7, 3], values[1, 0, 20, 5], values[0, 0, 3] = torch.nan, torch.inf, -0.0
        config = CacheConfig(**SETUPS[setup])
        store = filled(config, (keys, values), [17, 21, 22])
        expected = KVView(store).decode()
        with serving(emulated, isa):
            assert_same(filled(config, (keys, values), [17, 21, 22]), store)
            found = KVView(store).decode()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


@each_setup
def test_attention_is_the_same_but_for_the_last_bits(emulated: Emulated, setup: str, keep_threads: None) -> None:
    torch.set_num_threads(3)  # what is cut for three threads is merged, though one does it all
    config = CacheConfig(**SETUPS[setup])
    share = 6e-5 if (format := get_format(config.format)) is not None and format.offset == "zero_point" else 2e-5
    generator = torch.Generator().manual_seed(len(setup))
    for number, (batch, kv_heads, group, q_len, kv_len, key_dim, value_dim) in enumerate(SHAPES):
        if not fits(SETUPS[setup], key_dim, value_dim):
            continue
        keys, values = kv(kv_len, batch, kv_heads, key_dim, value_dim, seed=number)
        if batch > 1:  # one head's output is not a number
            keys[0, 0, 3, 0] = values[1, -1, 18, 1] = torch.nan
        view = KVView(filled(config, (keys, values)))
        query = torch.randn(batch, kv_heads * group, q_len, key_dim, generator=generator)
        mask = torch.rand(batch, 1, q_len, kv_len, generator=generator) < 0.8
        sinks = torch.linspace(-1, 1, kv_heads * group)
        how = [(None, True, None, None), (mask, False, 5.0, sinks), (mask.float().log(), False, None, None)][number % 3]
        isa, dtype = [("neon", torch.float32), ("neon", torch.bfloat16), ("portable", torch.float32)][number // 2 % 3]
        expected = cpu.attend(query.to(dtype), view, how[0], key_dim**-0.5, *how[1:]).double()
        with serving(emulated, isa):
            found = cpu.attend(query.to(dtype), view, how[0], key_dim**-0.5, *how[1:]).double()
        ulp = 0 if dtype == torch.float32 else 2**-9
        assert torch.equal(found.isnan(), expected.isnan())
        assert bool(found.isnan().any()) == (batch > 1)
        found, expected = found.nan_to_num(), expected.nan_to_num()
        assert (found - expected).square().mean() <= (share + ulp) ** 2 * expected.square().mean()
