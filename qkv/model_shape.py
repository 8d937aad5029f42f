"""What the layers of a model hand to a cache, from its configuration alone.

The model is built on torch's meta device, where tensors have shapes and no memory, and run once on a few tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
)

from qkv.models import EMBEDDED, check_dtype, find_model
from qkv.named_caches import as_argument
from qkv.shapes import SHAPES

# What the model is run on to see what its layers hand to the cache.
_ROWS, _TOKENS = 2, 4


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a model.

    Args:
        name: ``smollm2``, one of ``SHAPES``, a folder, a GGUF file, or a name on the hub. A file or folder of the name
            of a shape is not looked for; write ``./NAME`` for it.

    Raises:
        ValueError: there is no such model, or its configuration cannot be read.
    """
    if name == EMBEDDED:
        name = "smollm2-135m"
    if name in SHAPES:
        return SHAPES[name].config()
    try:
        source = find_model(name)
    except ValueError as error:
        raise ValueError(f"{error}; or use a shape that is built in: {', '.join(SHAPES)}") from None
    try:
        if isinstance(source, Path) and source.is_file():
            return AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
        return AutoConfig.from_pretrained(str(source))
    except ImportError as error:
        raise ValueError(f"reading a GGUF file needs more packages; run: pip install 'qkv[demo]' ({error})") from error
    except Exception as error:  # of a damaged GGUF file the reader says struct.error, KeyError, what it happens to meet
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(".")
        where = "hub name" if isinstance(source, str) else "file" if source.is_file() else "folder"
        hint = f"; shapes that need no download: {', '.join(SHAPES)}" if where == "hub name" else ""
        raise ValueError(f"cannot read the configuration of the {where} {name!r}: {reason}{hint}") from error


@dataclass(frozen=True)
class Call:
    """What a model hands to the cache of one layer in a pass.

    Attributes:
        method: of the layer: ``update``, ``update_conv_state``, ``update_recurrent_state`` or ``update_indexer``.
        tensors: shape and dtype of each tensor, for ``_ROWS`` rows and ``_TOKENS`` tokens.
        tokens_at: the dimension that counts tokens; None: it is the same for any number of them.
        args, kwargs: other arguments, by place and by name.
    """

    method: str
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    tokens_at: int | None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def made(self, rows: int, tokens: int) -> list[torch.Tensor]:
        """The tensors for that many rows and tokens, on the meta device."""
        made = []
        for shape, dtype in self.tensors:
            sizes = [shape[0] // _ROWS * rows, *shape[1:]]
            if self.tokens_at is not None:
                sizes[self.tokens_at] = tokens
            made.append(torch.empty(sizes, dtype=dtype, device="meta"))
        return made

    def make(self, layer: Any, rows: int, tokens: int) -> None:
        """Calls the method of ``layer`` with tensors for that many rows and tokens."""
        getattr(layer, self.method)(*self.made(rows, tokens), *self.args, **dict(self.kwargs))


class _Recorder(DynamicCache):
    """A cache that writes down what it is handed."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.calls: dict[int, list[Call]] = {}

    def _note(
        self, layer: int, method: str, tensors: Sequence[torch.Tensor], at: int | None, *args: Any, **kwargs: Any
    ) -> None:
        described = tuple((tuple(x.shape), x.dtype) for x in tensors)
        call = Call(method, described, at, args, tuple(sorted(kwargs.items())))
        self.calls.setdefault(layer, []).append(call)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx, "update", (key_states, value_states), 2)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx, "update_conv_state", (conv_states,), None, *args, **kwargs)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx, "update_recurrent_state", (recurrent_states,), None, *args, **kwargs)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> Any:
        self._note(layer_idx, "update_indexer", (indexer_key_states,), 1)
        return super().update_indexer(indexer_key_states, layer_idx)


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs to know of a model.

    Attributes:
        config: its configuration.
        parameters: numbers in its weights; tied ones count once.
        calls: for each layer with a cache, what it hands to it.
        cross_calls: the same of the attention to an encoder; None: there is no encoder.
    """

    config: PreTrainedConfig
    parameters: int
    calls: dict[int, tuple[Call, ...]]
    cross_calls: dict[int, tuple[Call, ...]] | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: str = "bfloat16") -> ModelShape:
        """Builds the model without memory, and runs it to see what its layers hand to a cache.

        Args:
            config: of any model that transformers itself knows how to build.
            dtype: in which the model computes, one of ``qkv.models.DTYPES``.

        Raises:
            ValueError: transformers does not know the model, or it cannot be run without numbers.
        """
        try:
            model = meta_model(config, dtype)
            cache = _run(model)
        except ValueError:
            raise
        except Exception as error:  # whatever somebody's model does where there are no numbers
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"a {config.model_type} model cannot be planned: run without weights it fails with "
                f"{type(error).__name__}: {reason}"
            ) from error
        parameters = sum(x.numel() for x in model.parameters())
        if isinstance(cache, EncoderDecoderCache):
            parts = (cache.self_attention_cache, cache.cross_attention_cache)
            return cls(config, parameters, *map(_by_layer, parts))
        return cls(config, parameters, _by_layer(cache))

    def layer_kinds(self) -> dict[str, int]:
        """How many layers there are of each kind, such as ``full``, ``latent``, ``sliding``, ``linear and full``."""
        found = Counter(_kind_of(layer) for layer in DynamicCache(config=self.config).layers)
        if getattr(self.config.get_text_config(decoder=True), "kv_lora_rank", None) and found["full"]:
            found["latent"] = found.pop("full")
        if self.cross_calls:
            found["cross"] = len(self.cross_calls)
        return dict(found)


def meta_model(config: PreTrainedConfig, dtype: str = "bfloat16") -> Any:
    """A model of transformers on torch's meta device: shapes and no memory.

    Args:
        config: of the model; it stays as it is.
        dtype: of the weights, one of ``qkv.models.DTYPES``.

    Raises:
        ValueError: transformers does not know the model, or no such dtype.
    """
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"a plan is made from a model's configuration, not from a {type(config).__name__}")
    check_dtype(dtype)
    kind = _model_class(config)
    built = deepcopy(config)
    built.__dict__.pop("quantization_config", None)
    for part in {id(part): part for part in (built, built.get_text_config(decoder=True))}.values():
        # Others look at numbers: at which experts are chosen, or whether a mask is all ones.
        part._experts_implementation = "batched_mm"
        part._attn_implementation = "eager"
    with torch.device("meta"):
        return kind.from_config(built, dtype=getattr(torch, dtype)).eval()


def _by_layer(recorder: Any) -> dict[int, tuple[Call, ...]]:
    return {index: tuple(calls) for index, calls in sorted(recorder.calls.items())}


def _model_class(config: PreTrainedConfig) -> Any:
    """The automatic class that builds a model with a head for text from ``config``."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    # Of some encoder-decoder models there is a half that is a language model by itself.
    for kind in kinds[2:] if config.is_encoder_decoder else kinds:
        if type(config) in kind._model_mapping:
            return kind
    raise ValueError(
        f"transformers knows no model that writes text for a configuration of type {config.model_type!r}; code that "
        "comes with a model is not run"
    )


def _run(model: Any) -> Any:
    """Runs a model on the meta device; gives the cache it has used."""
    config = model.config
    config.pad_token_id = None  # some models look into the input for it
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    cache: Any = _Recorder(config)
    if config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, _Recorder(config))
        inputs["decoder_input_ids"] = ids
        if model.main_input_name != "input_ids":
            sizes = (_ROWS, config.num_mel_bins, 2 * config.max_source_positions)
            inputs[model.main_input_name] = torch.zeros(sizes, dtype=model.dtype, device="meta")
            del inputs["input_ids"]
    with torch.no_grad():
        model(**inputs, **as_argument(cache), use_cache=True)
    return cache


def _kind_of(layer: Any) -> str:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    names = ["linear"] if isinstance(layer, LinearAttentionCacheLayerMixin) else []
    if hasattr(layer, "sliding_window"):
        names.append("sliding")
    elif hasattr(layer, "get_seq_length"):
        names.append("full")
    return " and ".join(names) or "none"
