"""Which backend serves attention, what is refused, and that it reads what is stored now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attending import (
    CHANNELS,
    Data,
    Shape,
    Wanted,
    assert_close,
    each_backend,
    exact,
    f64,
    random_data,
    rms,
    run,
    view_of,
)
from instruction_sets import each_instruction_set, needs_kernels, using
from setups import SETUPS

from qkv import native
from qkv.attention import attention, choose, reference
from qkv.attention.cpu import MAX_QUERIES, supports
from qkv.config import CacheConfig
from qkv.formats import get_format, register
from qkv.storage import LayerStore
from qkv.view import KVView


@each_backend
@pytest.mark.parametrize("change", ["append", "crop and append", "batch", "reset"])
def test_a_view_is_refused_once_its_layer_was_updated(backend: str, change: str) -> None:
    data = random_data(Shape(2, 1, 2, 1, 30))
    view = view_of(data, CacheConfig("int8", equalize=False))
    run(backend, data.query, view)
    store = view.store
    token = (data.keys[:, :, :1], data.values[:, :, :1])
    if change == "append":
        store.append(*token)
    elif change == "crop and append":  # the length is the same again
        store.crop(29)
        store.append(*token)
    elif change == "batch":
        store.map_batch(lambda x: x.flip(0))
    else:
        store.reset()
        store.append(data.keys.flip(2), data.values)
    with pytest.raises(RuntimeError, match="out of date"):
        run(backend, data.query, view)
    with pytest.raises(RuntimeError, match="out of date"):
        view.decode()
    outs = [run(which, data.query, KVView(store)) for which in (backend, "reference")]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-3)  # any other token would make more


@each_instruction_set
def test_the_kernel_reads_what_is_stored_now_after_every_kind_of_change(isa: str) -> None:
    """The addresses of segments are kept between steps: none may be out of date."""
    shape = Shape(2, 1, 2, 1, 600)
    for config in (
        CacheConfig("int8", equalize=False),
        CacheConfig("int8", residual_length=20, sink_tokens=4),
        CacheConfig("int8", granularity="head"),
        CacheConfig("none", sink_tokens=70),
        CacheConfig("int4", **CHANNELS, value_format="int4_rot"),
        CacheConfig("int4", granularity="channel", residual_length=9),
        CacheConfig("int6_rot", equalize=True),
    ):
        store = LayerStore(config)

        def check(store: LayerStore = store) -> None:
            query = random_data(shape, seed=9).query[: store.shape[0]]
            out = run(isa, query, KVView(store))
            # Far below the difference that any other token would make, above what the kernel's rounding does.
            torch.testing.assert_close(out, attention(query, KVView(store), backend="reference"), rtol=0, atol=1e-3)

        for round_ in range(3):
            data = random_data(shape, seed=round_)
            for start, end in ((0, 3), (3, 4), (4, 80), (80, 81), (81, 82), (82, 400)):
                store.append(data.keys[:, :, start:end], data.values[:, :, start:end])
                check()
            store.crop(90)
            check()
            store.append(data.keys[:, :, 500:505], data.values[:, :, 500:505])
            check()
            store.map_batch(lambda x: x.flip(0))
            check()
            store.crop(1)
            check()
            store.append(data.keys[:, :, 400:600], data.values[:, :, 400:600])
            check()
            store.map_batch(lambda x: x[:1])
            check()
            store.reset()


@needs_kernels
def test_auto_takes_the_kernel_for_up_to_eight_queries_and_decodes_for_more() -> None:
    for q_len, served in ((1, "cpu"), (MAX_QUERIES, "cpu"), (MAX_QUERIES + 1, "dense")):
        data = random_data(Shape(1, 1, 2, q_len, 20))
        view = view_of(data, CacheConfig("int8", equalize=False))
        told: list[str] = []
        view.on_served = told.append
        assert choose(data.query, view) == choose(data.query, view, "cpu") == served
        attention(data.query, view)
        attention(data.query, view, backend="reference")
        assert told == [served, "reference"]


def test_without_kernels_auto_decodes_and_cpu_is_refused_with_the_reason() -> None:
    data = random_data(Shape())
    view = view_of(data, CacheConfig("int8", equalize=False))
    with using("none"):
        assert choose(data.query, view) == "dense"
        assert choose(data.query, view, "reference") == "reference"
        with pytest.raises(ValueError, match="backend 'cpu' cannot be used: switched off by a test"):
            attention(data.query, view, backend="cpu")


def test_an_unknown_backend_is_refused_with_the_list_of_known_ones() -> None:
    data = random_data(Shape())
    with pytest.raises(ValueError, match="unknown backend 'gpu'; use one of auto, cpu, triton, reference"):
        attention(data.query, view_of(data, CacheConfig("int8", equalize=False)), backend="gpu")


def test_types_that_the_kernel_does_not_know_are_decoded() -> None:
    data = random_data(Shape(1, 1, 2, 2, 30), torch.float64)
    view = view_of(data, CacheConfig("int8", equalize=False))
    assert choose(data.query, view) == "dense"
    assert "float64" in str(supports(data.query, view))
    wanted = exact(data.query, *view.decode(torch.float64))
    assert rms(f64(attention(data.query, view)) - wanted) < 1e-12
    assert reference.supports(data.query, view) is None


def test_a_format_that_the_kernel_does_not_know_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["qkv.formats"]  # the attribute `qkv.formats` is the function
    monkeypatch.setattr(module, "_table", dict(module._table))
    kind = type(get_format("int8"))
    register(type("Other", (kind,), {"name": "other", "native_id": None}))
    data = random_data(Shape(2, 1, 2, 2, 70))
    view = view_of(data, CacheConfig("other", residual_length=3, granularity="head"))
    assert choose(data.query, view) == "dense"
    assert "other" in str(supports(data.query, view))
    assert_close("dense", data, view)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"query": torch.zeros(2, 4, 16)}, r"query must be \[batch=2, a multiple of 2 heads, q_len, head_dim=16\]"),
        ({"query": torch.zeros(1, 4, 2, 16)}, "query must be"),
        ({"query": torch.zeros(2, 3, 2, 16)}, "query must be"),
        ({"query": torch.zeros(2, 4, 2, 8)}, "query must be"),
        ({"mask": torch.ones(2, 30).bool()}, r"mask must be \[batch=2 or 1, heads=4 or 1, q_len=2, kv_len=30\]"),
        ({"mask": torch.ones(1, 1, 2, 29).bool()}, "mask must be"),
        ({"mask": torch.ones(1, 1, 3, 30).bool()}, "mask must be"),
        ({"mask": torch.ones(3, 1, 2, 30).bool()}, "mask must be"),
        ({"mask": torch.ones(1, 2, 2, 30).bool()}, "mask must be"),
        ({"mask": torch.ones(1, 1, 2, 30).long()}, "mask must be boolean, or additive and floating point"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[q_heads=4\], not \[2\]"),
        ({"sinks": torch.zeros(4, 1)}, "sinks must be"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"softcap": -1.0}, "softcap must be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(backend: str, how: dict[str, Any], message: str) -> None:
    data = random_data(Shape(2, 2, 2, 2, 30))
    view = view_of(data, CacheConfig("int8", equalize=False))
    with pytest.raises(ValueError, match=message):
        attention(**{"query": data.query, "view": view, "backend": backend, **how})


def test_a_layer_that_holds_nothing_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="the cache layer is empty"):
        attention(torch.zeros(1, 1, 1, 16), KVView(LayerStore(CacheConfig("int8"))))


OFF = """
import sys, warnings, torch
warnings.simplefilter("error")
from qkv import native
from qkv.attention import attention, choose
from qkv.config import CacheConfig
from qkv.storage import LayerStore
from qkv.view import KVView
assert native.library() is None and "QKV_KERNELS=off" in native.status(), native.status()
results = {}
for name, (options, query, keys, values) in torch.load(sys.argv[1]).items():
    store = LayerStore(CacheConfig(**options))
    store.append(keys, values)
    view = KVView(store)
    assert choose(query, view) == "dense"
    results[name] = attention(query, view), *view.decode()
torch.save(results, sys.argv[2])
"""


def test_without_the_compiled_library_the_results_are_the_same(tmp_path: Path) -> None:
    """The same codes, and the same numbers out of them, bit for bit."""
    cases = {}
    for seed, (name, options) in enumerate(SETUPS.items()):
        more = {"residual_length": 3, "sink_tokens": 2}
        cases[name] = {**options, **more}, *random_data(Shape(2, 2, 3, 2, 140, 64, 96), seed=seed)
    torch.save(cases, tmp_path / "cases.pt")
    command = [sys.executable, "-c", OFF, str(tmp_path / "cases.pt"), str(tmp_path / "results.pt")]
    done = subprocess.run(command, env={**os.environ, "QKV_KERNELS": "off"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    for name, (options, *inputs) in cases.items():
        data, store = Data(*inputs), LayerStore(CacheConfig(**options))
        store.append(data.keys, data.values)
        view = KVView(store)
        out, keys, values = results[name]
        for a, b in zip((keys, values), view.decode(), strict=True):
            assert torch.equal(a, b), name
        wanted = Wanted(data, view)
        assert name == "none" or wanted.quantization > 0
        wanted.check("dense", out)
        wanted.check("portable", attention(data.query, view))


@needs_kernels
def test_an_instruction_set_that_is_not_there_is_refused_and_the_choice_stays() -> None:
    before = native.status()
    with pytest.raises(ValueError, match=f"kernels for 'neon' cannot be used here; in use: {before}"):
        native.select("neon")
    assert native.status() == before


@needs_kernels
@pytest.mark.parametrize("wanted", ["portable", "nonsense"])
def test_the_environment_chooses_the_instruction_set(wanted: str) -> None:
    code = "from qkv import native; print(native.library() is not None, native.status())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "QKV_KERNELS": wanted},
        capture_output=True,
        text=True,
    )
    expected = {
        "portable": "True portable",
        "nonsense": "False QKV_KERNELS=nonsense: this build or processor has no such",
    }
    assert done.stdout.startswith(expected[wanted])
