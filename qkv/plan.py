"""How much memory a cache is going to take, from a model's configuration alone.

Nothing of how memory is allocated is told a second time here. The model is built on torch's meta device, where tensors
have shapes and no memory, and run once on a few tokens: that says what every layer hands to its cache. A real
:class:`qkv.QKVCache` then takes as many such tokens as are planned, on the meta device too, and says how large it is.

Sizes grow evenly once segments are full: a long context is planned as one of a few thousand tokens and a number of
times what a segment brings.

What a plan cannot know are numbers. With a scale per head that is not given, it takes it that no later token exceeds
the scale of the first ones: each time one does, the segment before it is cut short and a new one begins. Sizes are
those on a CPU; elsewhere a segment of one-byte keys may be a few tokens smaller. And they are those between two passes:
in the pass of a prompt, all of it is held, in layers with a window too.

What a cache does when it is full (``max_tokens``, ``max_bytes``, ``on_full``) is decided by the code that decides it
for a cache: the length of a window by its :class:`qkv.limits.Limits`, what moves to a file by a
:class:`qkv.spill.Spill` that writes nothing.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import astuple, dataclass, replace
from math import lcm
from pathlib import Path
from types import SimpleNamespace
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
from qkv.layers import ATTENTION_NAME, QKVLayer, QKVSlidingLayer
from qkv.limits import NoRoomError
from qkv.models import EMBEDDED, check_dtype, find_model
from qkv.named_caches import as_argument
from qkv.planes import Segment
from qkv.room import full_segments, segment_bytes
from qkv.shapes import SHAPES
from qkv.spill import _ALIGNMENT, Spill, _Mapped
from qkv.storage import LARGE_STORE_TOKENS, SEGMENT_TOKENS, SMALL_SEGMENT_TOKENS, LayerStore
from qkv.window import QKVWindowLayer

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
# A configuration of a model whose attention is qkv's: what a layer hands out is not decoded then, and windows take
# several sequences.
_FUSED = SimpleNamespace(_attn_implementation=ATTENTION_NAME)


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


@dataclass(frozen=True)
class Size:
    """How large a cache is.

    Attributes:
        allocated: bytes: codes, scales, exact tokens, spare room, and the states of linear attention.
        stored: bytes that a decoding step reads: of the tokens held, without spare room, and those states.
        bits: bits of the tokens held in layers that qkv stores.
        values: numbers held there.
        states: of ``allocated``, bytes that are not in a store of qkv.
        movable: of ``allocated``, bytes of full segments, which ``on_full="offload"`` can move to its file.
        doubtful: bytes that ``max_bytes`` counts on top, since numbers decide whether they are needed.
    """

    allocated: int = 0
    stored: int = 0
    bits: int = 0
    values: int = 0
    states: int = 0
    movable: int = 0
    doubtful: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Size:
        return Size(*(a * times for a in astuple(self)))


@dataclass(frozen=True)
class Places:
    """Where the bytes of a cache are.

    Attributes:
        memory: bytes in memory.
        file: bytes in the file of ``on_full="offload"``, as ``QKVCache.offloaded_bytes()`` counts them: in whole pages.
        reading: bytes in memory while the layer is read of which most lies in the file.
    """

    memory: int
    file: int
    reading: int

    def __add__(self, other: Places) -> Places:
        return Places(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class CachePlan:
    """How large a :class:`qkv.QKVCache` is going to be.

    Args:
        shape: of the model.
        cache: what the cache is to be: the name of a format or set-up, the path of a YAML file, a
            :class:`qkv.CacheConfig`.
        max_cache_len: of a static layout: tokens that may come at most; None: it grows.
        options: as :class:`qkv.QKVCache` takes them, ``max_tokens``, ``max_bytes`` and ``on_full`` among them.

    Attributes:
        config: the :class:`qkv.CacheConfig` of the cache.

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
            _Part(QKVCache(shape.config, cache, max_cache_len=length, **options), calls) for calls, length in parts
        ]
        self.config = self._parts[0].config

    def size(self, context: int, batch: int = 1, steps: int = 0, encoder_tokens: int = 0) -> Size:
        """The size of the cache of ``batch`` sequences of ``context`` tokens.

        Args:
            context: tokens in all that come, at least 1.
            batch: sequences, at least 1.
            steps: how many of the tokens come one by one behind the others, which come in one pass. It changes how
                much spare room there is: segments are as long as is fit when they begin.
            encoder_tokens: tokens of the encoder's output, for a model that has one; 0: as many as it always gives
                (Whisper), or as many as ``context``.

        Raises:
            ValueError: numbers out of range; a format that does not go with the model's heads; of a cache with
                ``on_full="window"``, too few bytes for any window, or more tokens than a table of positions has. Tokens
                that another cache would refuse raise nothing, see :meth:`fits`.
        """
        passes = self._passes(context, batch, steps, encoder_tokens)
        sizes = (part.size(prompt, more, batch) for part, prompt, more in passes)
        return sum(sizes, start=Size())

    def nbytes(self, context: int, batch: int = 1, **more: int) -> int:
        """Bytes that the cache takes, see :meth:`size`: ``QKVCache.nbytes()``, and the states of linear attention."""
        return self.size(context, batch, **more).allocated

    def places(self, context: int, batch: int = 1, steps: int = 0, encoder_tokens: int = 0) -> Places:
        """Where the bytes are after all passes, with the arguments of :meth:`size`.

        Without ``on_full="offload"`` all are in memory. With it the time that this takes grows with ``context``.

        Raises:
            ValueError: as :meth:`size`.
        """
        if self.config.on_full != "offload":
            held = self.nbytes(context, batch, steps=steps, encoder_tokens=encoder_tokens)
            return Places(held, 0, held)
        passes = self._passes(context, batch, steps, encoder_tokens)
        return sum((part.places(prompt, more, batch) for part, prompt, more in passes), start=Places(0, 0, 0))

    def fits(self, context: int, batch: int = 1, free: int | None = None) -> bool:
        """Whether a cache takes so many tokens, and where ``free`` is given, in that many bytes of memory.

        What is read of a file comes into memory a layer at a time: with ``on_full="offload"`` each has to have room
        beside what of the others can not be moved.

        A group of tokens that is not full yet takes more than it will then, and so do tokens that no scale has been
        taken from: fewer tokens have to fit, too.

        Args:
            context, batch: as :meth:`size`; all tokens come in one pass.
            free: bytes of memory; None: not known.

        Raises:
            ValueError: as :meth:`size`, but for a window that is too small, or a table of positions: such do not fit.
        """
        config = self.config
        kept = config.on_full in (None, "error")
        if kept and config.max_tokens is not None and context > config.max_tokens:
            return False
        return all(self._fits(tokens, batch, free) for tokens in (context, *self._larger(context)))

    def _fits(self, tokens: int, batch: int, free: int | None) -> bool:
        """As :meth:`fits`, of just so many tokens."""
        try:
            needed = [part.needed(prompt, batch) for part, prompt, _ in self._passes(tokens, batch, 0, 0)]
        except ValueError:
            if self.config.on_full == "window":
                return False
            raise
        return None not in needed and (free is None or sum(n or 0 for n in needed) <= free)

    def _larger(self, context: int) -> list[int]:
        """Fewer tokens than ``context`` that may take more: where the most of them are exact."""
        found = {n for group in self._parts[0].groups(1) for n in group.exact_most(context)}
        return sorted(found - {context}, reverse=True)

    def window(self, batch: int = 1) -> int | None:
        """Tokens of each sequence that stay, the first ones included; None: nothing leaves layers of full attention.

        Raises:
            ValueError: as :meth:`size`.
        """
        for group in self._parts[0].groups(batch):
            if isinstance(group.layer, QKVWindowLayer):
                return group.layer.window + group.layer.sinks.count
        return None

    @property
    def period(self) -> int:
        """Tokens after which the same happens again, in a context of many."""
        return lcm(*(group.period for part in self._parts for group in part.groups(1)))

    def _passes(self, context: int, batch: int, steps: int, encoder_tokens: int) -> Iterator[tuple[_Part, int, int]]:
        """Each part with the tokens of its first pass, and the number of steps behind it."""
        for name, value, least in (("context", context, 1), ("batch", batch, 1), ("steps", steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if steps > context:
            raise ValueError(f"steps={steps} are more than the {context} tokens of the context")
        encoder_tokens = encoder_tokens or getattr(self.shape.config, "max_source_positions", None) or context
        # Of attention to an encoder there is a second part.
        return zip(self._parts, (context - steps, encoder_tokens), (steps, 0), strict=False)


class _Part:
    """One cache of a model: an encoder-decoder has two.

    Args:
        cache: new; it stays empty.
        calls: for each layer with a cache, what is handed to it.
    """

    def __init__(self, cache: QKVCache, calls: dict[int, tuple[Call, ...]]):
        self._cache, self._calls = cache, calls
        self.config = cache.config
        self._known: dict[int, list[_Group]] = {}

    def groups(self, batch: int) -> list[_Group]:
        """The layers, those that store alike together. How many tokens ``max_bytes`` are depends on the batch."""
        by_bytes = self.config.on_full == "window" and self.config.max_bytes is not None
        key = batch if by_bytes else 0
        if key not in self._known:
            cache = deepcopy(self._cache)
            window = self._window(batch) if by_bytes else None
            for layer in cache.layers:
                if window is not None and isinstance(layer, QKVWindowLayer):
                    layer.set_window(window)
            self._known[key] = _layer_groups(cache, self._calls)
        return self._known[key]

    def _window(self, batch: int) -> int | None:
        """Tokens behind the first ones that ``max_bytes`` let stay: asked of a cache that takes some."""
        cache = deepcopy(self._cache)
        for index, handed in self._calls.items():
            layer = cache.layers[index]
            if isinstance(layer, QKVLayer):
                layer.model_config = _FUSED
            for call in handed:
                if isinstance(layer, QKVLayer) and call.method == "update":
                    assert cache._limits is not None
                    cache._limits.check(cache.layers, index, *call.made(batch, 1))
                call.make(layer, batch, 1)
        windows = [layer.window for layer in cache.layers if isinstance(layer, QKVWindowLayer)]
        return windows[-1] if windows else None

    def size(self, prompt: int, steps: int, batch: int) -> Size:
        """The size after a pass of ``prompt`` tokens and single steps."""
        sizes = (group.size(prompt, steps, batch) * group.count for group in self.groups(batch))
        return sum(sizes, start=Size())

    def needed(self, prompt: int, batch: int) -> int | None:
        """Bytes of memory for a pass of ``prompt`` tokens; None: the limits do not let that many come."""
        size, limit = self.size(prompt, 0, batch), self.config.max_bytes
        if limit is None or self.config.on_full == "window":
            return size.allocated
        if self.config.on_full != "offload":
            return size.allocated if size.allocated + size.doubtful <= limit else None
        stored = size.allocated - size.states
        most = max(group.size(prompt, 0, batch).movable for group in self.groups(batch))
        # While a layer is read, all of it is in memory.
        fits = stored - size.movable + most + size.doubtful <= limit
        return size.states + min(stored, limit) if fits else None

    def places(self, prompt: int, steps: int, batch: int) -> Places:
        """Where the bytes are with ``on_full="offload"``: layers make room in turn, as qkv.limits does it."""
        limit, spill = self.config.max_bytes, _Unwritten()
        assert limit is not None
        of = {index: group for group in self.groups(batch) for index in group.indices}
        stores = {i: layer.store for i, layer in enumerate(self._cache.layers) if isinstance(layer, QKVLayer)}
        running = {id(group): group.passes(prompt, steps, batch) for group in of.values()}
        for n in [prompt] * (prompt > 0) + [1] * steps:
            layers = {key: next(run) for key, run in running.items()}
            for index, group in sorted(of.items(), key=lambda pair: pair[0]):
                layer = layers[id(group)]
                if not isinstance(layer, QKVLayer):
                    continue
                # Layers of a group go on at different times: each has the store as it is when its turn comes.
                now = _snapshot(layer.store)
                if n >= SMALL_SEGMENT_TOKENS:
                    grows = now.nbytes() - stores[index].nbytes()
                    spill.make_room(list(stores.items()), index, limit - max(0, grows))
                stores[index] = now
                spill._bytes.pop(index, None)
                spill.make_room(list(stores.items()), index, limit)
        held = self.size(prompt, steps, batch).allocated
        filed = [spill._count(index, store)[1] for index, store in stores.items()]
        in_file = spill.moved_bytes(list(stores.items()))
        return Places(held - sum(filed), in_file, held - sum(filed) + max(filed, default=0))


def _snapshot(store: LayerStore) -> LayerStore:
    """A store whose size stays as it is when the other goes on."""
    fresh = copy(store)
    fresh.packed = list(store.packed)
    if store._open and store.packed[-1].room:
        fresh.packed[-1] = copy(store.packed[-1])
    return fresh


class _Unwritten(Spill):
    """Decides as the file of a cache does, and writes nothing."""

    def rest(self) -> None:
        self._read = None

    def _written(self, segment: Segment) -> _Mapped:
        sizes = (tensor.untyped_storage().nbytes() for tensor in segment.tensors())
        size = sum(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return _Mapped(segment, segment.key.codes, None, size)  # type: ignore[arg-type]  # nothing is read there


class _Group:
    """Layers of one model that store alike, of which one is planned.

    Attributes:
        layer: one of them, empty.
        indices: which they are.
        period: tokens after which the same happens again.
    """

    def __init__(self, layer: Any, calls: tuple[Call, ...], index: int):
        self.layer, self._calls, self.indices = layer, calls, [index]
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
        if isinstance(layer, QKVWindowLayer):
            self._even += layer.window + layer.sinks.count
            if layer.positions is not None:
                self._even = layer.positions  # more are refused

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.indices)

    def exact_most(self, context: int) -> list[int]:
        """Of fewer than ``context`` tokens those numbers at which the most wait to be encoded.

        Of the first ones, and of the last: for their group to be full, with the last segment full or not.
        """
        if not isinstance(self.layer, QKVLayer):
            return []
        store, residual = self.layer.store, self.layer.store.config.residual_length
        last = context - (context - residual + 1) % store.group
        first = max(store.warm, residual + store.group) - 1
        found = [last, last - store.group, first]
        if isinstance(self.layer, QKVSlidingLayer):  # just behind the beginning of a segment it holds one more
            sinks = store.config.sink_tokens
            found.append(sinks + (context - sinks - 1) // SMALL_SEGMENT_TOKENS * SMALL_SEGMENT_TOKENS + 1)
        return [n for n in found if 0 < n < context]

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
            *_, layer = self.passes(prompt, steps, batch)
            self._known[key] = _size_of(layer)
        return self._known[key]

    def passes(self, prompt: int, steps: int, batch: int) -> Iterator[Any]:
        """One of the layers, after a pass of ``prompt`` tokens if there are any, and after each step."""
        layer = deepcopy(self.layer)
        if prompt:
            for call in self._calls:
                call.make(layer, batch, prompt)
            yield layer
        for _ in range(steps):
            for call in self._calls:
                if call.tokens_at is not None or not prompt:
                    call.make(layer, batch, 1)
            yield layer


def _size_of(layer: Any) -> Size:
    """The size of one layer of any kind, on the meta device."""
    states = _state_bytes(layer)
    if not isinstance(layer, QKVLayer):
        held = states + sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor))
        return Size(held, held, states=held)
    store, bits = layer.store, layer.stored_bits()
    return Size(
        allocated=layer.nbytes() + _copied_bytes(layer) + states,
        stored=bits // 8 + states,
        bits=bits,
        values=layer.stored_values(),
        states=states,
        movable=sum(map(segment_bytes, full_segments(store))),
        doubtful=_doubtful_bytes(store),
    )


def _doubtful_bytes(store: LayerStore) -> int:
    """Bytes of a segment that begins if a scale per head has to grow; 0 where there are no such scales."""
    grow = any(head is not None and not head.given for head in (store._key_head, store._value_head))
    return max(map(segment_bytes, store.packed), default=0) if grow else 0


def _copied_bytes(layer: QKVLayer) -> int:
    """Bytes of the keys of the first tokens as they came, complex128, which are not made on the meta device."""
    if not isinstance(layer, QKVWindowLayer) or layer.sinks.turning is None or layer.store.shape is None:
        return 0
    batch, heads, _, _ = layer.store.shape
    return 16 * batch * heads * layer.sinks.length * len(layer.sinks.turning.frequencies)


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
            layer.model_config = _FUSED
            store = layer.store
            given = tuple(x is not None for x in (*store._given, *store._vectors))
            key = (*key, store.config, given)
        if isinstance(layer, QKVWindowLayer):
            turning = layer.sinks.turning
            turned = None if turning is None else len(turning.frequencies)
            key = (*key, layer.window, layer.sinks.count, turned, layer.positions)
        if key in groups:
            groups[key].indices.append(index)
        else:
            groups[key] = _Group(layer, handed, index)
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
        max_context: the longest context that fits beside the weights and that the cache's limits let come, as all
            shorter ones do, in whole segments of 256 tokens; 0: none of that length; None: neither memory nor a limit
            was named, or a billion tokens fit (with a window: any number).
        max_batch: the most sequences of the context planned that fit; None: as above, or a million fit.
        read_ms_per_token: the time, ms, that reading everything that is stored takes: the least that a decoding step of
            the whole batch can take. Of a file this holds while the system keeps it in memory.
        memory_bytes: those in memory.
        file_bytes: bytes in the file of ``on_full="offload"``, in whole pages.
        reading_bytes: as ``memory_bytes``, while the layer is read of which most lies in the file.
        window: tokens of each sequence that stay with ``on_full="window"``, the first ones included; None: all do.
        refused: whether the limits of the cache do not let the context planned come.
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
    memory_bytes: int
    file_bytes: int
    reading_bytes: int
    window: int | None
    refused: bool


def plan_row(
    shape: ModelShape,
    name: str,
    cache: str | Path | CacheConfig,
    context: int,
    batch: int = 1,
    free: int | None = None,
    bandwidth: float = DEFAULT_BANDWIDTH,
    static: bool = False,
    **limits: Any,
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
        limits: ``max_tokens``, ``max_bytes``, ``on_full`` and other options of :class:`qkv.QKVCache`.

    Raises:
        ValueError: as :class:`CachePlan`.
    """
    growing = CachePlan(shape, cache, **limits)

    def plan(tokens: int) -> CachePlan:
        return CachePlan(shape, cache, tokens, **limits) if static else growing

    try:
        growing.window(batch)
        period = growing.period
    except NoRoomError:
        return _without_room(shape, name, cache, context, batch, free, bandwidth)
    planned = plan(context).size(context, batch)
    refused = not plan(context).fits(context, batch)
    # What will never be there is not looked for in a file.
    held = Places(planned.allocated, 0, planned.allocated)
    if not refused and growing.config.on_full == "offload":
        held = growing.places(context, batch)
    return Row(
        format=name,
        context=context,
        batch=batch,
        bits_per_value=planned.bits / planned.values if planned.values else 0.0,
        bytes_per_token=_growth(plan, context, batch, period),
        kv_bytes=planned.allocated,
        max_context=_longest(plan, growing, batch, free),
        max_batch=None if free is None else largest(lambda n: plan(context).fits(context, n, free), 1, _MOST_ROWS),
        read_ms_per_token=planned.stored / bandwidth * 1e3,
        memory_bytes=held.memory,
        file_bytes=held.file,
        reading_bytes=held.reading,
        window=growing.window(batch),
        refused=refused,
    )


def _without_room(
    shape: ModelShape,
    name: str,
    cache: str | Path | CacheConfig,
    context: int,
    batch: int,
    free: int | None,
    bandwidth: float,
) -> Row:
    """The row of a cache whose window never has room: sizes are those without limits."""
    config = replace(CacheConfig.of(cache), max_tokens=None, max_bytes=None, on_full=None, offload_folder=None)
    row = plan_row(shape, name, config, context, batch, free, bandwidth)
    return replace(row, max_context=0, max_batch=None if free is None else 0, window=None, refused=True)


def _growth(plan: Callable[[int], CachePlan], context: int, batch: int, period: int) -> float:
    """Bytes per token and sequence of the ``period`` tokens that come next."""
    try:
        later = plan(context + period).nbytes(context + period, batch)
    except ValueError:
        if plan(context).config.on_full != "window":
            raise
        return 0.0  # a table of positions ends
    return (later - plan(context).nbytes(context, batch)) / period / batch


def _longest(plan: Callable[[int], CachePlan], growing: CachePlan, batch: int, free: int | None) -> int | None:
    """The longest context, see :class:`Row`."""
    config = growing.config
    if free is None and config.max_tokens is None and config.max_bytes is None:
        return None
    last = config.max_tokens if config.on_full != "window" else None
    if last is not None and plan(last).fits(last, batch, free):
        return last
    return largest(lambda n: plan(n).fits(n, batch, free), growing.period, _MOST_TOKENS)


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
