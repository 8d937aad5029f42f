"""What a cache is to be: a frozen, checked description that can be written to and read from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from qkv.presets import PRESETS

GRANULARITIES = ("token", "head", "group", "channel", "tensor")
PREFILLS = ("stored", "exact")
BACKENDS = ("auto", "cpu", "triton", "reference")
ON_FULL = ("error", "window", "offload")
# What `layers` may change for one layer.
LAYER_KEYS = (
    "format",
    "key_format",
    "value_format",
    "granularity",
    "key_granularity",
    "value_granularity",
    "group_size",
    "key_group_size",
    "value_group_size",
    "equalize",
    "residual_length",
    "sink_tokens",
)


def _whole(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(allowed)}")


@dataclass(frozen=True)
class CacheConfig:
    """Everything that determines how a cache stores keys and values.

    Whether the formats exist and go with the granularity is checked when a cache is made from it.

    Attributes:
        format: number format of keys and values, see :func:`qkv.formats`.
        key_format: format of the keys where it differs.
        value_format: format of the values where it differs.
        granularity: what shares a scale: ``token`` (per token and head, dynamic), ``head`` (per head, static),
            ``group`` (per token and group of channels), ``channel`` (per channel and group of tokens); None: the
            format's default.
        key_granularity, value_granularity: where keys or values differ.
        group_size: channels in a group (granularity ``group``) or tokens in a group (``channel``); None: the default.
        key_group_size, value_group_size: where keys or values differ.
        equalize: whether channels of keys are centred and divided by a vector per head before they are encoded, taken
            from the first tokens or given with ``scales``; None: where the format gains by it (``int8``).
        residual_length: the last tokens that are kept exact, a window that moves with every token.
        sink_tokens: the first tokens that are kept exact.
        scales: path of a safetensors file with static scales per head.
        prefill: ``stored``: every query sees stored values, the prompt's own pass included; ``exact``: the tokens of a
            pass of several tokens see each other unquantized.
        backend: ``auto``, ``cpu`` or ``triton`` (these kernels, or an error), or ``reference`` (plain torch).
        max_tokens: tokens that may come (``on_full="error"``), or that stay (``"window"``); None: no limit.
        max_bytes: bytes that the cache may take: in all, or with ``on_full="offload"`` in memory (on a GPU: in its
            memory; on several: together); None: no limit.
        on_full: what happens at the limit: ``error``, before anything is written (None: this, where there is a limit);
            ``window``: the first ``sink_tokens`` and the last tokens stay, see sinks.py; ``offload``: full segments
            move to a file that is mapped into memory, see spill.py, or of a cache on a GPU to the CPU's memory, see
            host_spill.py. ``max_bytes`` holds behind each update of a layer: with ``window`` for the most that its
            tokens take, wherever segments begin and end (scales per head that grow shorten the window when the pass has
            ended, a batch that grows before the next one; recorded tokens come on top); with ``offload`` for what is in
            memory, a layer that is read counted as a whole. There an error says before anything is written that what
            cannot move (exact tokens, a segment of each layer that is not full) and one layer exceed it. Beside the
            limit are: the tokens of a pass that are about to be encoded; in a pass of fewer than 128 tokens, until its
            layer has stored them, a segment; states of linear attention (``offload``).
        offload_folder: where that file is; None: where temporary files go. Only for caches on the CPU.
        layers: changes for single layers: ``{layer index: {name: value}}``.

    Raises:
        ValueError: a value that is not allowed; the message says what is.
    """

    format: str = "int8"
    key_format: str | None = None
    value_format: str | None = None
    granularity: str | None = None
    key_granularity: str | None = None
    value_granularity: str | None = None
    group_size: int | None = None
    key_group_size: int | None = None
    value_group_size: int | None = None
    equalize: bool | None = None
    residual_length: int = 0
    sink_tokens: int = 0
    scales: str | None = None
    prefill: str = "stored"
    backend: str = "auto"
    max_tokens: int | None = None
    max_bytes: int | None = None
    on_full: str | None = None
    offload_folder: str | None = None
    layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("format", "key_format", "value_format"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name != "format"):
                raise ValueError(f"{name} must be the name of a format, not {value!r}")
        for name in ("granularity", "key_granularity", "value_granularity"):
            if getattr(self, name) is not None:
                _one_of(name, getattr(self, name), GRANULARITIES)
        for name in ("group_size", "key_group_size", "value_group_size"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.equalize is not None and not isinstance(self.equalize, bool):
            raise ValueError(f"equalize must be true, false or None, not {self.equalize!r}")
        _whole("residual_length", self.residual_length)
        _whole("sink_tokens", self.sink_tokens)
        if self.scales is not None:
            object.__setattr__(self, "scales", str(self.scales))
        _one_of("prefill", self.prefill, PREFILLS)
        _one_of("backend", self.backend, BACKENDS)
        self._check_limits()
        # Copied and made read-only: what the caller passed in stays theirs.
        object.__setattr__(self, "layers", MappingProxyType(self._checked_layers(self.layers)))
        for index in self.layers:
            try:
                self.for_layer(index)
            except ValueError as error:
                raise ValueError(f"layers[{index!r}]: {error}") from None

    def _check_limits(self) -> None:
        for name in ("max_tokens", "max_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.offload_folder is not None:
            object.__setattr__(self, "offload_folder", str(self.offload_folder))
        if self.on_full is None:
            if self.offload_folder is not None:
                raise ValueError("offload_folder goes with on_full='offload'")
            return
        _one_of("on_full", self.on_full, ON_FULL)
        if self.on_full == "offload":
            if self.max_bytes is None or self.max_tokens is not None:
                raise ValueError("on_full='offload' goes with max_bytes, those that stay in memory, and not max_tokens")
            return
        if self.offload_folder is not None:
            raise ValueError(f"offload_folder goes with on_full='offload', not {self.on_full!r}")
        if self.max_tokens is None and self.max_bytes is None:
            raise ValueError(f"on_full={self.on_full!r} needs a limit: max_tokens or max_bytes")
        if self.on_full == "window" and self.max_tokens is not None and self.max_tokens <= self.sink_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} leaves nothing beside sink_tokens={self.sink_tokens}; it must be larger"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheConfig:
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheConfig.from_dict, (self.to_dict(),)  # a read-only mapping cannot be pickled

    def __hash__(self) -> int:
        # Equal whatever the order in which layers and changes were written down.
        values = self.to_dict()
        layers = sorted((index, sorted(changes.items())) for index, changes in values.pop("layers", {}).items())
        return hash(repr((sorted(values.items()), layers)))

    @staticmethod
    def _checked_layers(layers: Any) -> dict[int, Mapping[str, Any]]:
        if layers is None:
            return {}
        if not isinstance(layers, Mapping):
            raise ValueError(f"layers must map layer indices to changes, not {layers!r}")
        checked: dict[int, Mapping[str, Any]] = {}
        for index, changes in layers.items():
            if not isinstance(changes, Mapping):
                raise ValueError(f"layers[{index!r}] must map names to values, not {changes!r}")
            unknown = [key for key in changes if key not in LAYER_KEYS]
            if unknown:
                raise ValueError(f"layers[{index!r}]: unknown key {unknown[0]!r}; known keys: {', '.join(LAYER_KEYS)}")
            checked[_whole("a layer index", index)] = MappingProxyType(dict(changes))
        return checked

    def for_layer(self, index: int) -> CacheConfig:
        """The description of one layer, with the changes for it applied."""
        changes = self.layers.get(index)
        return replace(self, layers={}, **changes) if changes else self

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary of everything that is not at its default; :meth:`from_dict` reads it."""
        result: dict[str, Any] = {"format": self.format}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "layers":
                if value:
                    result["layers"] = {index: dict(changes) for index, changes in value.items()}
            elif f.name != "format" and value != f.default:
                result[f.name] = value
        return result

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheConfig:
        """A configuration from a mapping of names to values.

        Raises:
            ValueError: an unknown name, or a value that is not allowed.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a cache configuration maps names to values; found {type(values).__name__}")
        known = [f.name for f in fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r} in a cache configuration; known keys: {', '.join(known)}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> CacheConfig:
        """A configuration from a YAML file.

        Raises:
            ValueError: the file does not exist, is no YAML, or holds an unknown name or a value that is not allowed.
        """
        path = Path(path)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the cache configuration {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is not valid YAML: {reason}") from None
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_yaml(self, path: str | Path) -> None:
        """Writes the configuration to a YAML file that :meth:`from_yaml` reads."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def of(cls, what: str | Path | CacheConfig) -> CacheConfig:
        """A configuration from what users pass: a format, a preset, the path of a YAML file, or a configuration.

        Raises:
            ValueError: neither of these.
        """
        if isinstance(what, CacheConfig):
            return what
        if isinstance(what, Path) or (isinstance(what, str) and what.endswith((".yaml", ".yml"))):
            return cls.from_yaml(what)
        if isinstance(what, str):
            return cls.from_dict(PRESETS[what]) if what in PRESETS else cls(format=what)
        raise ValueError(
            f"format must be the name of a format or preset, a YAML path or a CacheConfig, not {type(what).__name__}"
        )
