"""Checks and measures attention over a quantized cache on an NVIDIA GPU, in one run of less than 8 minutes.

Needs torch, triton and transformers; qkv is taken from the folder above, and nothing of it has to be compiled:

    python tools/gpu_check.py --json gpu.json

Rows of the JSON, by their key `check`:

* `attention`: a kernel against attention in double precision on the same codes, at large shapes. `error` may be twice
  `plain`, the error of torch's attention in the model's own type on the decoded tensors, and a little.
* `encode`: bytes of codes, scales and zero points that differ from those of the formats in Python, on a CPU; 0.
* `lengths`, `graph`, `compile`: lengths in the device's memory; appending and attention recorded into a CUDA graph and
  replayed; a decoding step of a model under torch.compile.
* `offload`: a model with a cache whose older part lies in the CPU's memory: the same logits, bit for bit, as with one
  that is all on the GPU (`whole_`). `memory` is what a prompt in two pieces and steps took of the GPU's memory at most,
  activations included; `ms_per_step` is a median.
* `speed`: against the fastest of torch's attentions on bfloat16 tensors (`bf16_ms`); times of CUDA graphs, medians, the
  level-2 cache emptied before each; `eager_ms` is one call from Python. `fraction_of_copy_bandwidth` is what a step
  reads by the time it takes, over what a copy within the device's memory reads and writes.

Exits 0 if all checks hold, 1 if one does not, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BEGIN = time.monotonic()
Row = dict[str, Any]


class Shape(NamedTuple):
    batch: int
    kv_heads: int
    group: int
    dim: int
    tokens: int
    q_len: int = 1


FORMATS = ("int8", "fp8_e4m3", "int4", "int4_rot")
# Llama 3 8B, SmolLM2 135M, Gemma 3 270M.
CHECKED = (Shape(2, 8, 4, 128, 20_000), Shape(3, 3, 3, 64, 5_001, 5), Shape(1, 1, 4, 256, 9_000, 8))
TINY = (Shape(1, 1, 3, 32, 140, 2),)
BATCHES, CONTEXTS = (1, 8, 32), (4_096, 32_768, 131_072)
SPEED = Shape(1, 8, 4, 128, 0)


def arguments() -> argparse.Namespace:
    about, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="-", metavar="FILE", help="where to write; - for standard output")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=420, help="begin nothing new after that (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="no torch.compile, and contexts up to 32,768")
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="only the checks, in Triton's interpreter, at tiny shapes: no GPU needed",
    )
    return parser.parse_args()


def fail(message: str) -> None:
    print(f"gpu_check: {message}", file=sys.stderr)
    sys.exit(2)


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGIN:4.0f} s]", *words, file=sys.stderr, flush=True)


OPTIONS = arguments()
sys.path.insert(0, str(ROOT))
os.environ["QKV_KERNELS"] = "off"  # on a CPU, too, codes lie as on a GPU
if OPTIONS.interpret:
    os.environ["TRITON_INTERPRET"] = "1"
try:
    import torch
except ImportError:
    fail("torch is not installed")
if not OPTIONS.interpret and not torch.cuda.is_available():
    fail("there is no GPU that torch can use; --interpret runs the checks without one")
try:
    import triton
except ImportError:
    fail("triton is not installed; pip install triton")

import qkv  # noqa: E402
from qkv import host_spill, planes  # noqa: E402
from qkv.attention import attention, dense, triton_decode  # noqa: E402
from qkv.config import CacheConfig  # noqa: E402
from qkv.formats import get_format, triton_encode  # noqa: E402
from qkv.formats.layout import ROWS, layout_for  # noqa: E402
from qkv.planes import Plane, Scaling  # noqa: E402
from qkv.storage import LayerStore  # noqa: E402
from qkv.view import KVView  # noqa: E402

DEVICE = torch.device("cpu" if OPTIONS.interpret else "cuda")
NAMES = [name for name in OPTIONS.formats.split(",") if name]


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE).to(dtype)


def filled(name: str, shape: Shape, dtype: torch.dtype = torch.bfloat16, **options: Any) -> LayerStore:
    """A store of random tokens, the same few thousand over and over."""
    store = LayerStore(CacheConfig(name, **options))
    piece = min(shape.tokens, max(64, 2**27 // (shape.batch * shape.kv_heads * shape.dim * 4)))
    keys, values = random(2, shape.batch, shape.kv_heads, piece, shape.dim, dtype=dtype)
    while store.length < shape.tokens:
        n = min(piece, shape.tokens - store.length)
        store.append(keys[:, :, :n], values[:, :, :n])
    return store


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def error(out: torch.Tensor, query: torch.Tensor, view: KVView, **how: Any) -> tuple[float, float, bool]:
    """Of a result, its error, that of torch's attention in the same type, and whether the first is small enough."""
    exact = attention(query.double(), view, backend="reference", **how)
    keys, values = view.decode(query.dtype)
    scale = how.get("softmax_scale") or query.shape[3] ** -0.5
    rest = (how.get("causal", True), how.get("softcap"), how.get("sinks"))
    plain = rms(dense.attend(query, keys, values, how.get("mask"), scale, *rest).double() - exact)
    off = rms(out.double() - exact)
    return off, plain, off <= 2 * plain + 1e-5 * rms(exact)


# ---- checks --------------------------------------------------------------------------------------------------------


def check_attention() -> Iterator[Row]:
    for shape in TINY if OPTIONS.interpret else CHECKED:
        for name in NAMES:
            for what in ("plain", "fp16", "windows"):
                dtype = torch.float16 if what == "fp16" else torch.bfloat16
                options = {"sink_tokens": 4, "residual_length": 33} if what == "windows" else {}
                store = filled(name, shape, dtype, **options)
                view = KVView(store, first=7 if what == "windows" else None)
                query = random(shape.batch, shape.kv_heads * shape.group, shape.q_len, shape.dim, dtype=dtype)
                how: dict[str, Any] = {}
                if what == "windows":
                    how["mask"] = torch.rand(shape.batch, 1, shape.q_len, view.length, device=DEVICE) < 0.8
                    how["softcap"] = 30.0
                    how["sinks"] = torch.randn(query.shape[1], device=DEVICE)
                out = attention(query, view, backend="triton", **how)
                off, plain, ok = error(out, query, view, **how)
                yield {"check": "attention", "format": name, "what": what, **shape._asdict(), "error": off,
                       "plain": plain, "ok": ok}  # fmt: skip


def check_encode() -> Iterator[Row]:
    """Every format with the scales that it has by default, and one token at a time as well."""
    for name in NAMES:
        format = get_format(name)
        assert format is not None
        granularities = {format.granularities[0], format.key_granularity or "token"}
        for granularity in sorted(granularities):
            for is_key in (True, False):
                dim, tokens = (64, 64) if OPTIONS.interpret else (128, 4096)
                group = format.group_sizes.get(granularity, 0)
                rows = random(1, 2, tokens, dim)
                there = Plane(rows[:, :, :0], tokens, format, is_key, Scaling(granularity, group))
                here = Plane(rows[:, :, :0].cpu(), tokens, format, is_key, Scaling(granularity, group))
                assert triton_encode.write(there, 0, rows)
                here.write(0, rows.cpu())
                differ = 0
                for part in ("codes", "scale", "offset"):
                    one, other = getattr(there, part), getattr(here, part)
                    if one is not None:
                        one, other = (x.contiguous().view(torch.uint8).cpu() for x in (one, other))
                        differ += int((one != other).sum())
                yield {"check": "encode", "format": name, "granularity": granularity, "is_key": is_key,
                       "bytes_that_differ": differ, "ok": differ == 0}  # fmt: skip


def static_stores(shape: Shape, more: int) -> tuple[LayerStore, LayerStore, torch.Tensor, torch.Tensor]:
    """Two stores of the same tokens with room for ``more``, and keys and values that are to come."""
    config = CacheConfig("int8", equalize=False)
    stores = [LayerStore(config, capacity=shape.tokens + more) for _ in range(2)]
    keys, values = random(2, shape.batch, shape.kv_heads, shape.tokens + more, shape.dim)
    for store in stores:
        store.append(keys[:, :, : shape.tokens], values[:, :, : shape.tokens])
    return stores[0], stores[1], keys[:, :, shape.tokens :], values[:, :, shape.tokens :]


def check_steps(record: bool) -> Iterator[Row]:
    """Appending and attention at places that are in the device's memory, recorded into a CUDA graph or not."""
    shape = Shape(1, 1, 2, 32, 140) if OPTIONS.interpret else Shape(2, 8, 4, 128, 5_000)
    store, other, keys, values = static_stores(shape, 6)
    view, lengths = KVView(store), triton_decode.Lengths(store)
    position = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    query = random(shape.batch, shape.kv_heads * shape.group, 1, shape.dim)
    new = [torch.zeros_like(x[:, :, :1]) for x in (keys, values)]
    segment = store.packed[0]

    def step() -> torch.Tensor:
        for plane, rows in zip(segment.planes(), new, strict=True):
            assert triton_encode.write(plane, 0, rows, position)
        return triton_decode.attend(query, view, None, shape.dim**-0.5, True, None, None, lengths)

    position.fill_(shape.tokens)
    out = step()  # compiles, and makes the table of addresses
    replay: Callable[[], torch.Tensor] = step
    if record:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()

        def replayed() -> torch.Tensor:
            graph.replay()
            return out

        replay = replayed
    worst = 0.0
    for t in range(keys.shape[2]):
        other.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
        for buffer, rows in zip(new, (keys, values), strict=True):
            buffer.copy_(rows[:, :, t : t + 1])
        position.fill_(shape.tokens + t)
        lengths.set(triton_decode.lengths_of(other))
        expected = attention(query, KVView(other), backend="triton")
        worst = max(worst, rms(replay().float() - expected.float()) / rms(expected))
    yield {"check": "graph" if record else "lengths", **shape._asdict(), "steps": keys.shape[2], "error": worst,
           "ok": worst < 1e-2}  # fmt: skip


def check_compile() -> Iterator[Row]:
    """A decoding step of a small model under torch.compile, with a cache of a static layout."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    qkv.enable(model)
    tokens = torch.randint(0, 512, (1, 300), device=DEVICE)
    said = {}
    with torch.inference_mode():
        for compiled in (False, True):
            cache = qkv.QKVCache(model.config, "int8", max_cache_len=512)
            model(tokens[:, :290], past_key_values=cache)
            forward = torch.compile(model) if compiled else model
            logits = [forward(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(290, 300)]
            said[compiled] = torch.cat(logits, dim=1).float()
    off = rms(said[True] - said[False]) / rms(said[False])
    yield {"check": "compile", "model": "Llama, 2 layers", "error": off, "ok": off < 2e-2}


def check_offload() -> Iterator[Row]:
    """A prompt in two pieces and steps of a small model, with half of the cache in the CPU's memory."""
    import transformers

    small = OPTIONS.interpret
    tokens, steps = (560, 2) if small else (16_000, 20)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64 if small else 1024, intermediate_size=64, num_hidden_layers=2 if small else 8,
        num_attention_heads=2 if small else 8, num_key_value_heads=1 if small else 4, max_position_embeddings=32_768,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    qkv.enable(model)
    ids = torch.randint(0, 512, (1, tokens + steps), device=DEVICE)

    def took(cache: qkv.QKVCache) -> Row:
        base = torch.cuda.memory_allocated() if not small else 0
        if not small:
            torch.cuda.reset_peak_memory_stats()
        logits, times = [], []
        for begin, end in ((0, tokens // 2), (tokens // 2, tokens), *((t, t + 1) for t in range(tokens, len(ids[0])))):
            start = time.monotonic()
            out = model(ids[:, begin:end], past_key_values=cache, logits_to_keep=1).logits.cpu()  # waits for it
            logits.append(out)
            times.append((time.monotonic() - start) * 1e3)
        memory = torch.cuda.max_memory_allocated() - base if not small else 0
        return {"logits": torch.cat(logits, 1), "ms": statistics.median(times[2:]), "memory": memory}

    for name in NAMES:
        with torch.inference_mode():
            whole = qkv.QKVCache(model.config, name, backend="triton")
            wanted = took(whole)
            limit = int(0.75 * whole.nbytes())
            del whole
            cache = qkv.QKVCache(model.config, name, backend="triton", max_bytes=limit, on_full="offload")
            got = took(cache)
        gone = cache.offloaded_bytes()
        same = torch.equal(got["logits"], wanted["logits"])
        at_host = isinstance(cache._limits.spill, host_spill.HostSpill)
        yield {"check": "offload", "format": name, "tokens": tokens, "kv_bytes": cache.nbytes(), "max_bytes": limit,
               "offloaded_bytes": gone, "memory": got["memory"], "whole_memory": wanted["memory"],
               "ms_per_step": got["ms"], "whole_ms_per_step": wanted["ms"],
               "ok": same and gone > 0 and at_host}  # fmt: skip
        del cache


# ---- speed ---------------------------------------------------------------------------------------------------------


def recorded(call: Callable[[], Any]) -> Callable[[], None]:
    """The same call as a CUDA graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def median_ms(call: Callable[[], Any], flush: torch.Tensor, seconds: float = 0.3) -> float:
    """The median time of a call, nothing of what it reads in the level-2 cache."""
    times, begin = [], time.monotonic()
    call()
    while len(times) < 5 or (time.monotonic() - begin < seconds and len(times) < 200):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        flush.zero_()
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times)


def copy_bandwidth(flush: torch.Tensor) -> float:
    """Bytes read and written by a copy within the device's memory, in GB/s."""
    a = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.nbytes / median_ms(lambda: b.copy_(a), flush) / 1e6


def bf16_ms(shape: Shape, query: torch.Tensor, flush: torch.Tensor) -> tuple[float, str]:
    """The fastest way that torch has for the same attention on bfloat16 tensors, and its name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = (random(shape.batch, shape.kv_heads, 4096, shape.dim) for _ in range(2))
    keys, values = (x.repeat(1, 1, shape.tokens // 4096, 1) for x in (keys, values))
    found: dict[str, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                call = recorded(lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True))
                found[backend.name.lower()] = median_ms(call, flush)
        except RuntimeError as failure:
            say(f"torch's {backend.name} does not serve: {str(failure).splitlines()[0][:100]}")
    name = min(found, key=lambda x: found[x])
    return found[name], name


def measure(bandwidth: float, flush: torch.Tensor, late: Callable[[], bool]) -> Iterator[Row]:
    memory = torch.cuda.get_device_properties(DEVICE).total_memory
    contexts = [n for n in CONTEXTS if not OPTIONS.quick or n <= 32_768]
    for tokens in contexts:
        for batch in BATCHES:
            shape = SPEED._replace(batch=batch, tokens=tokens)
            needed = 4 * batch * tokens * shape.kv_heads * shape.dim
            if needed > memory * 0.4 or late():
                say(f"left out: batch {batch}, context {tokens}")
                continue
            query = random(batch, shape.kv_heads * shape.group, 1, shape.dim)
            plain, name = bf16_ms(shape, query, flush)
            torch.cuda.empty_cache()
            for format in NAMES:
                if late():
                    continue
                store = filled(format, shape)
                view = KVView(store)

                def call(query: torch.Tensor = query, view: KVView = view) -> torch.Tensor:
                    return attention(query, view, backend="triton")

                replay = recorded(call)
                ms, eager = median_ms(replay, flush), median_ms(call, flush, 0.1)
                rate = store.stored_bits() / 8 / ms / 1e6
                row = {"check": "speed", "format": format, **shape._asdict(), "ms": ms, "eager_ms": eager,
                       "bf16_ms": plain, "bf16_by": name, "speedup": plain / ms, "gb_per_s": rate,
                       "fraction_of_copy_bandwidth": rate / bandwidth,
                       "bits_per_value": store.stored_bits() / store.stored_values(), "ok": True}  # fmt: skip
                say(f"{format:9s} batch {batch:2d} context {tokens:6d}: {ms:.3f} ms, {plain / ms:.2f}x bfloat16, "
                    f"{100 * rate / bandwidth:.0f}% of copy bandwidth")  # fmt: skip
                yield row
                del store, view, call, replay
                torch.cuda.empty_cache()


def about() -> dict[str, Any]:
    made: dict[str, Any] = {
        "qkv": qkv.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": "interpreter",
    }
    if not OPTIONS.interpret:
        properties = torch.cuda.get_device_properties(DEVICE)
        made |= {"device": properties.name, "capability": list(torch.cuda.get_device_capability(DEVICE)),
                 "multiprocessors": properties.multi_processor_count, "memory": properties.total_memory,
                 "cuda": torch.version.cuda}  # fmt: skip
    return made


def run(rows: list[Row], check: str, make: Callable[[], Iterator[Row]]) -> None:
    """Adds the rows of a check; one that fails to run is a row that is not ok."""
    say(check)
    try:
        for row in make():
            rows.append(row)
            if not row["ok"]:
                say("NOT OK:", row)
    except Exception as failure:  # the other checks are worth having
        rows.append({"check": check, "ok": False, "failure": f"{type(failure).__name__}: {failure}"[:2000]})
        say("NOT OK:", rows[-1])


def main() -> int:
    torch.manual_seed(0)
    # Also where a CPU computes what a GPU is held against.
    planes.layout_for = lambda device, is_key, bits=8: ROWS if bits == 8 else layout_for(device, is_key, bits)
    rows: list[Row] = []
    meta = about()
    run(rows, "attention", check_attention)
    run(rows, "encode", check_encode)
    run(rows, "lengths", lambda: check_steps(record=False))
    if OPTIONS.interpret:  # the CPU stands for a GPU
        host_spill.serves = lambda device: True
    run(rows, "offload", check_offload)
    if not OPTIONS.interpret:
        run(rows, "graph", lambda: check_steps(record=True))
        flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
        meta["copy_gb_per_s"] = copy_bandwidth(flush)
        say(f"a copy reads and writes {meta['copy_gb_per_s']:.0f} GB/s")
        run(rows, "speed", lambda: measure(meta["copy_gb_per_s"], flush, lambda: passed() > OPTIONS.seconds - 60))
        if not OPTIONS.quick and passed() < OPTIONS.seconds:
            run(rows, "compile", check_compile)
    meta["seconds"] = round(passed(), 1)
    text = json.dumps({"meta": meta, "rows": rows}, indent=1)
    if OPTIONS.json == "-":
        print(text)
    else:
        Path(OPTIONS.json).write_text(text + "\n", encoding="utf-8")
    wrong = [row for row in rows if not row["ok"]]
    say(f"{len(rows) - len(wrong)} of {len(rows)} rows are well")
    return 1 if wrong else 0


def passed() -> float:
    return time.monotonic() - BEGIN


if __name__ == "__main__":
    sys.exit(main())
