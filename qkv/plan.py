"""How much memory a cache is going to take, from a model's configuration alone.

Nothing of how memory is allocated is told a second time here. The model is built on torch's meta device, where tensors
have shapes and no memory, and run once on a few tokens: that says what every layer hands to its cache. A real
:class:`qkv.QKVCache` then takes as many such tokens as are planned, on the meta device too, and says how large it is.

Sizes grow evenly once segments are full: a long context is planned as one of a few thousand tokens and a number of
times what a segment brings.

What a plan cannot know are numbers. With a scale per head that is not given, it takes it that no later token exceeds
the scale of the first ones: each time one does, the segment before it is cut short and a new one begins. Sizes are
those on a CPU; elsewhere a segment of one-byte keys may be a few tokens smaller. And they are those between two passes:
in the pass of a prompt, all of it is held, in layers with a sliding window too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass
from math import lcm
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

from qkv.cache import QKVCache
from qkv.config import CacheConfig
from qkv.layers import QKVLayer, QKVSlidingLayer
from qkv.models import EMBEDDED, check_dtype, find_model
from qkv.named_caches import as_argument
from qkv.shapes import SHAPES
from qkv.storage import LARGE_STORE_TOKENS, SEGMENT_TOKENS

# Bytes of one weight, scales of quantized ones not counted.
WEIGHT_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
# Bytes per second at which two channels of DDR5 are read, about.
DEFAULT_BANDWIDTH = 50e9
# A billion tokens, or a million sequences: no limit is meant.
_MOST_TOKENS, _MOST_ROWS = 1 << 30, 1 << 20
# What the model is run on to see what its layers hand to the cache.
_ROWS, _TOKENS = 2, 4
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]i?|)B?", re.IGNORECASE)


def parse_bytes(text: str, option: str, examples: str = "24GiB, 24GB or 512MiB") -> int:
    """Reads a size: ``24GiB``, ``24GB``, ``512MiB``, ``1.5T``, or a number of bytes.

    Raises:
        ValueError: it is no such size, or 0; the message names ``option`` and gives ``examples``.
    """
    found = _SIZE.fullmatch(text.strip())
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = int(float(found[1]) * units[found[2].lower()]) if found is not None else 0
    if size < 1:
        raise ValueError(f"{option}: {text!r} will not do; give one such as {examples}")
    return size


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

    def make(self, layer: Any, rows: int, tokens: int) -> None:
        """Calls the method of ``layer`` with tensors for that many rows and tokens, on the meta device."""
        made = []
        for shape, dtype in self.tensors:
            sizes = [shape[0] // _ROWS * rows, *shape[1:]]
            if self.tokens_at is not None:
                sizes[self.tokens_at] = tokens
            made.append(torch.empty(sizes, dtype=dtype, device="meta"))
        getattr(layer, self.method)(*made, *self.args, **dict(self.kwargs))


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


@dataclass(frozen=True)
class Size:
    """How large a cache is.

    Attributes:
        allocated: bytes: codes, scales, exact tokens, spare room, and the states of linear attention.
        stored: bytes that a decoding step reads: of the tokens held, without spare room, and those states.
        bits: bits of the tokens held in layers that qkv stores.
        values: numbers held there.
    """

    allocated: int = 0
    stored: int = 0
    bits: int = 0
    values: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Size:
        return Size(*(a * times for a in astuple(self)))


class CachePlan:
    """How large a :class:`qkv.QKVCache` is going to be.

    Args:
        shape: of the model.
        cache: what the cache is to be: the name of a format or set-up, the path of a YAML file, a
            :class:`qkv.CacheConfig`.
        max_cache_len: of a static layout: tokens that may come at most; None: it grows.
        options: as :class:`qkv.QKVCache` takes them.

    Raises:
        ValueError: as :class:`qkv.QKVCache`.
    """

    def __init__(
        self, shape: ModelShape, cache: str | Path | CacheConfig, max_cache_len: int | None = None, **options: Any
    ):
        self.shape, self.max_cache_len = shape, max_cache_len
        parts = [(shape.calls, max_cache_len)]
        if shape.cross_calls is not None:
            parts.append((shape.cross_calls, None))
        self._parts = [
            _layer_groups(QKVCache(shape.config, cache, max_cache_len=length, **options), calls)
            for calls, length in parts
        ]

    def size(self, context: int, batch: int = 1, steps: int = 0, encoder_tokens: int = 0) -> Size:
        """The size of the cache of ``batch`` sequences of ``context`` tokens.

        Args:
            context: tokens in all, at least 1.
            batch: sequences, at least 1.
            steps: how many of the tokens come one by one behind the others, which come in one pass. It changes how
                much spare room there is: segments are as long as is fit when they begin.
            encoder_tokens: tokens of the encoder's output, for a model that has one; 0: as many as it always gives
                (Whisper), or as many as ``context``.

        Raises:
            ValueError: numbers out of range; a format that does not go with the model's heads.
        """
        for name, value, least in (("context", context, 1), ("batch", batch, 1), ("steps", steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if steps > context:
            raise ValueError(f"steps={steps} are more than the {context} tokens of the context")
        encoder_tokens = encoder_tokens or getattr(self.shape.config, "max_source_positions", None) or context
        total = Size()
        # Of attention to an encoder there is a second part.
        for part, prompt, more in zip(self._parts, (context - steps, encoder_tokens), (steps, 0), strict=False):
            for group in part:
                total += group.size(prompt, more, batch) * group.count
        return total

    def nbytes(self, context: int, batch: int = 1, **more: int) -> int:
        """Bytes that the cache takes, see :meth:`size`: ``QKVCache.nbytes()``, and the states of linear attention."""
        return self.size(context, batch, **more).allocated

    @property
    def period(self) -> int:
        """Tokens after which the same happens again, in a context of many."""
        return lcm(*(group.period for part in self._parts for group in part))


class _Group:
    """Layers of one model that store alike, of which one is planned.

    Attributes:
        count: how many there are.
        period: tokens after which the same happens again.
    """

    def __init__(self, layer: Any, calls: tuple[Call, ...], count: int = 1):
        self._layer, self._calls, self.count = layer, calls, count
        self.period = SEGMENT_TOKENS
        self._even = 0  # tokens from which on sizes grow evenly
        self._known: dict[tuple[int, int, int], Size] = {}
        store = layer.store if isinstance(layer, QKVLayer) else None
        if store is not None:
            config = store.config
            self.period = lcm(SEGMENT_TOKENS, store.group)
            self._even = config.sink_tokens + config.residual_length + store.warm + store.group
            if config.residual_length > 0 or store.group > 1:  # segments are small until then
                self._even += LARGE_STORE_TOKENS
        # A layer of transformers holds as much as its window, which may be none.
        self._even += (getattr(layer, "sliding_window", None) or 0) + 2 * self.period
        if store is not None and store.capacity is not None and not isinstance(layer, QKVSlidingLayer):
            self._even = store.capacity  # one segment for all: nothing to be gained

    def size(self, prompt: int, steps: int, batch: int) -> Size:
        over = max(0, prompt - self._even) // self.period
        if over < 2:
            return self._measured(prompt, steps, batch)
        first = self._measured(prompt - over * self.period, steps, batch)
        second = self._measured(prompt - (over - 1) * self.period, steps, batch)
        return second * over + first * (1 - over)

    def _measured(self, prompt: int, steps: int, batch: int) -> Size:
        key = (prompt, steps, batch)
        if key not in self._known:
            self._known[key] = self._measure(prompt, steps, batch)
        return self._known[key]

    def _measure(self, prompt: int, steps: int, batch: int) -> Size:
        layer = deepcopy(self._layer)
        for call in self._calls if prompt else ():
            call.make(layer, batch, prompt)
        for _ in range(steps):
            for call in self._calls:
                if call.tokens_at is not None or not prompt:
                    call.make(layer, batch, 1)
        states = _state_bytes(layer)
        if not isinstance(layer, QKVLayer):
            held = states + sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor))
            return Size(held, held)
        bits = layer.store.stored_bits()
        return Size(layer.store.nbytes() + states, bits // 8 + states, bits, layer.store.stored_values())


def _state_bytes(layer: Any) -> int:
    """Bytes of the states of linear attention, which transformers keeps in dictionaries."""
    held = (x for states in vars(layer).values() if isinstance(states, dict) for x in states.values())
    return sum(x.nbytes for x in held if isinstance(x, torch.Tensor))


def _layer_groups(cache: QKVCache, calls: dict[int, tuple[Call, ...]]) -> list[_Group]:
    groups: dict[Any, _Group] = {}
    for index, handed in calls.items():
        layer = cache.layers[index]
        key: tuple[Any, ...] = (type(layer), getattr(layer, "sliding_window", None), handed)
        if isinstance(layer, QKVLayer):
            layer.model_config = None  # what it hands out is not looked at: it need not be decoded
            store = layer.store
            given = tuple(x is not None for x in (*store._given, *store._vectors))
            key = (*key, store.config, given)
        if key in groups:
            groups[key].count += 1
        else:
            groups[key] = _Group(layer, handed)
    return list(groups.values())


@dataclass(frozen=True)
class Row:
    """What one kind of cache takes. The names are those of the JSON rows of ``qkv plan``.

    Attributes:
        format: the name of the cache.
        context, batch: what is planned: tokens of each sequence, and sequences.
        bits_per_value: bits of a stored number with its share of scales and exact tokens, at the context planned; 0
            where qkv stores no layer.
        bytes_per_token: bytes that one more token of one sequence takes, on the average of the next segment. Layers
            with a window are full once the context is as long, and linear attention takes nothing.
        kv_bytes: bytes allocated at the context and batch planned, the states of linear attention included.
        max_context: the longest context that fits beside the weights, in whole segments of 256 tokens; 0: none of that
            length; None: no memory was named, or a billion tokens fit.
        max_batch: the most sequences of the context planned that fit; None: as above, or a million fit.
        read_ms_per_token: the time, ms, that reading everything that is stored takes: the least that a decoding step of
            the whole batch can take.
    """

    format: str
    context: int
    batch: int
    bits_per_value: float
    bytes_per_token: float
    kv_bytes: int
    max_context: int | None
    max_batch: int | None
    read_ms_per_token: float


def plan_row(
    shape: ModelShape,
    name: str,
    cache: str | Path | CacheConfig,
    context: int,
    batch: int = 1,
    free: int | None = None,
    bandwidth: float = DEFAULT_BANDWIDTH,
    static: bool = False,
) -> Row:
    """Plans one kind of cache.

    Args:
        shape: of the model.
        name: what the row is called.
        cache: as :class:`CachePlan` takes it.
        context: tokens of each sequence.
        batch: sequences.
        free: bytes that the cache may take; None: not known.
        bandwidth: bytes per second at which memory is read.
        static: a static layout of ``context`` tokens, or of those of any other context that is tried.

    Raises:
        ValueError: as :class:`CachePlan`.
    """
    growing = CachePlan(shape, cache)

    def size(tokens: int, rows: int) -> Size:
        return (CachePlan(shape, cache, tokens) if static else growing).size(tokens, rows)

    planned, later = size(context, batch), size(context + growing.period, batch)
    return Row(
        format=name,
        context=context,
        batch=batch,
        bits_per_value=planned.bits / planned.values if planned.values else 0.0,
        bytes_per_token=(later.allocated - planned.allocated) / growing.period / batch,
        kv_bytes=planned.allocated,
        max_context=None
        if free is None
        else largest(lambda n: size(n, batch).allocated <= free, growing.period, _MOST_TOKENS),
        max_batch=None if free is None else largest(lambda n: size(context, n).allocated <= free, 1, _MOST_ROWS),
        read_ms_per_token=planned.stored / bandwidth * 1e3,
    )


def largest(fits: Callable[[int], bool], step: int, limit: int) -> int | None:
    """The largest multiple of ``step`` that ``fits``, where all smaller ones do; 0: none; None: ``limit`` does."""
    if fits(limit):
        return None
    least, most = 0, limit // step
    while most - least > 1:
        middle = (least + most) // 2
        if fits(middle * step):
            least = middle
        else:
            most = middle
    return least * step
