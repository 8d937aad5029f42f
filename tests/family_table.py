"""The README's table of families: every row is what a tiny model of the family did.

``python tests/family_table.py`` prints it; ``--write README.md`` puts it between the marks there (``make families``).
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from families import FAMILIES, PIECES, decoder_part, encoded, logits, make_cache
from transformers import EncoderDecoderCache, PreTrainedModel

import qkv
from qkv.layers import QKVHybridLayer, QKVHybridSlidingLayer, QKVLayer, QKVSlidingLayer
from qkv.named_caches import as_argument

BEGIN, END = "<!-- families: make families -->", "<!-- end of families -->"
HEADER = (
    "| family | model | layers | a decoding step reads | static layout, one graph |",
    "| --- | --- | --- | --- | --- |",
)


def kind_of(layer: Any, layer_type: str) -> str:
    if isinstance(layer, QKVHybridSlidingLayer):
        return "linear with sliding"
    if isinstance(layer, QKVHybridLayer):
        return "linear with full"
    if isinstance(layer, QKVSlidingLayer):
        return "chunked" if layer_type == "chunked_attention" else "sliding"
    if isinstance(layer, QKVLayer):
        return "full"
    return "linear" if layer_type in ("linear_attention", "conv", "mamba", "linear") else "shares another's"


def layers_of(model: PreTrainedModel, cache: Any) -> str:
    layers = decoder_part(cache).layers
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"] * len(layers)
    linear = decoder_part(cache).is_linear
    found = Counter(
        kind_of(layer, "linear" if is_linear else layer_type)
        for layer, layer_type, is_linear in zip(layers, types, linear, strict=True)
    )
    return ", ".join([*found, *(["cross"] if isinstance(cache, EncoderDecoderCache) else [])])


def path_of(model: PreTrainedModel) -> tuple[str, str]:
    """The kinds of layers, and what a decoding step over int8 reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qkv.enable(model)
        cache = make_cache(model, "int8", equalize=False)  # encoded from the first token on
        logits(model, cache, PIECES)
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    )
    served = {row["backend"] for part in parts for row in part.stats()["layers"]} - {"untouched"}
    return layers_of(model, cache), {"cpu": "codes", "decoded": "one decoded layer at a time"}[served.pop()]


@torch.no_grad()
def compiles(model: PreTrainedModel) -> bool:
    """Whether the forward over a static layout is one graph that serves every step with the same logits.

    Over unquantized tokens: over codes, rounding in the graph may make another code, and a larger difference.
    """
    torch._dynamo.reset()
    qkv.enable(model)

    def static() -> Any:
        def one() -> qkv.QKVCache:
            return qkv.QKVCache(model.config, "none", max_cache_len=64)

        return EncoderDecoderCache(one(), one()) if model.config.is_encoder_decoder else one()

    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    ids = torch.randint(3, 90, (2, 28), generator=torch.Generator().manual_seed(1))
    extra = encoded(model)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    try:
        caches = static(), static()
        for cache in caches:
            model(**{name: ids[:, :20]}, **as_argument(cache), **extra)
        for i in range(20, 28):
            step = {name: ids[:, i : i + 1], **extra}
            with torch._dynamo.config.patch(error_on_recompile=i > 21):
                actual = compiled(**step, **as_argument(caches[0])).logits
            expected = model(**step, **as_argument(caches[1])).logits
            # Far above rounding, far below one token seen too few or too many.
            if float((actual - expected).abs().max()) > 1e-3 * float(expected.abs().max()):
                return False
    except Exception:  # whatever a compiler raises
        return False
    return True


def row(name: str, graphs: bool = True) -> str:
    """One row of the table; the last column, which takes seconds, only with ``graphs``."""
    model = FAMILIES[name]()
    layers, reads = path_of(model)
    last = ("yes" if compiles(FAMILIES[name]()) else "no") if graphs else ""
    return f"| {name} | `{type(model).__name__}` | {layers} | {reads} | {last} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="README", help="put the table between the marks of this file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    table = "\n".join([*HEADER, *(row(name) for name in FAMILIES)])
    if arguments.write is None:
        print(table)
        return
    text = arguments.write.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    arguments.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
