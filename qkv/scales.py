"""Static scales per head, and the vectors that keys are equalized by: their names, how they are read and written.

A file is safetensors and holds, for any of the layers,

====================================  =============================  =================================================
``layers.<i>.key_scale``              float32 ``[kv_heads]``          what a code of 1 of a key stands for
``layers.<i>.value_scale``            float32 ``[kv_heads]``          the same of a value
``layers.<i>.key_centre``             float32 ``[kv_heads, key_dim]`` subtracted from keys before they are encoded
``layers.<i>.key_multiplier``         float32 ``[kv_heads, key_dim]`` what they are divided by then
====================================  =============================  =================================================

``qkv calibrate`` also writes metadata, all of it text: ``qkv`` (version), ``cache_format``, ``model`` (JSON, see
:func:`model_fingerprint`), and how the scales were found. Only with metadata can scales of another model of the same
shapes, or of another format, be told apart; a file without them is taken as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from qkv.config import CacheConfig

# name of a tensor behind "layers.<i>." -> its shape, in words
KINDS = {
    "key_scale": "[kv_heads]",
    "value_scale": "[kv_heads]",
    "key_centre": "[kv_heads, key_dim]",
    "key_multiplier": "[kv_heads, key_dim]",
}
_NAME = re.compile(rf"layers\.(\d+)\.({'|'.join(KINDS)})")

# What a model is told by, in the order in which differences are reported.
_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "layer_types",
    "per_layer_config",
    "rope_parameters",
    "rope_theta",
)
# Families have further sizes under names of their own: swa_num_key_value_heads, qk_rope_head_dim, kv_lora_rank.
_MORE_FIELDS = re.compile(r".*(_heads|head_dim|_lora_rank)")
# A few tokens more make no other model: users add a token for padding, and sizes are rounded up.
_VOCABULARY_TOLERANCE = 0.02


class Scales(dict[str, torch.Tensor]):
    """Tensors by name, and what they were made for.

    Attributes:
        source: the file that they came from; None: they were given.
        metadata: of that file; empty where there are none.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        source: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ):
        super().__init__(tensors or {})
        self.source, self.metadata = source, dict(metadata or {})

    def check_purpose(self, model_config: Any, config: CacheConfig) -> None:
        """Checks the metadata, if there are any of ours, against a model and the formats of its layers.

        Args:
            model_config: the text part of the model's configuration, or None: not known, any model will do.
            config: how the layers are stored.

        Raises:
            ValueError: the scales were made for another model or another format.
        """
        if "qkv" not in self.metadata:
            return
        try:
            made_for = json.loads(self.metadata["model"])
            made_format = self.metadata["cache_format"]
            if not isinstance(made_for, dict):
                raise TypeError
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(
                f"the metadata of the scales in {self.source} are damaged; make the file anew with qkv calibrate"
            ) from None
        if model_config is not None:
            difference = model_difference(made_for, model_fingerprint(model_config))
            if difference is not None:
                raise ValueError(
                    f"the scales in {self.source} were made for another model: {difference}; make scales for this one "
                    "with qkv calibrate, or pass the tensors themselves if they are meant for it"
                )
        for name in self:
            index, kind = _parse(name)
            side = kind.partition("_")[0]
            layer = config.for_layer(index)
            stored = (layer.key_format if side == "key" else layer.value_format) or layer.format
            if stored != made_format:
                raise ValueError(
                    f"the scales in {self.source} were made for {made_format}, but layer {index} stores its {side}s as "
                    f"{stored}; use the format {made_format}, or make scales with qkv calibrate --format {stored}"
                )


def load_scales(source: str | Path | Mapping[str, torch.Tensor]) -> Scales:
    """Reads scales and equalizing vectors; the module says under which names.

    Args:
        source: the path of a safetensors file, or a mapping; a mapping's tensors are copied.

    Returns:
        A mapping of names to tensors, float32 on the device where they were: scales ``[kv_heads]``, vectors
        ``[kv_heads, key_dim]``. A file's metadata come along, unchecked; see :meth:`Scales.check_purpose`.

    Raises:
        ValueError: a file that cannot be read, a name of another kind, shapes that are no scale's or vector's or that
            do not go together in one layer, numbers that are not finite, or scales and multipliers that are not
            positive.
    """
    if isinstance(source, Mapping):
        return Scales(_checked(source))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(source), framework="pt") as file:
            metadata, names = file.metadata(), list(file.keys())
            found = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read scales from {source}: {error}") from None
    return Scales(_checked(found), str(source), metadata)


def save_scales(
    path: str | Path,
    scales: Mapping[str, torch.Tensor],
    model_config: Any,
    format: str,
    about: Mapping[str, str] | None = None,
) -> None:
    """Writes scales and equalizing vectors to a safetensors file that ``QKVCache(scales=path)`` takes for one model.

    The file appears whole or not at all.

    Args:
        path: where to.
        scales: names to tensors, as :func:`load_scales` gives them.
        model_config: the model's configuration.
        format: the name of the format that the scales are for.
        about: further metadata.

    Raises:
        ValueError: as :func:`load_scales`, or the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    fingerprint = model_fingerprint(model_config.get_text_config(decoder=True))
    metadata = {**(about or {}), "qkv": version("qkv"), "cache_format": format, "model": json.dumps(fingerprint)}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _checked(scales).items()}
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.writing")
    try:
        save_file(tensors, unfinished, metadata=metadata)
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise ValueError(f"cannot write scales to {path}: {error}") from error


def model_fingerprint(model_config: Any) -> dict[str, Any]:
    """What of a model's configuration its keys and values depend on, as values that JSON knows.

    The family, the numbers of layers and heads, all sizes that belong to attention, kinds of layers, and the rotary
    embedding. Two models that agree in all of that, such as a model and what it was tuned to, are taken as one. Not a
    part of it: what changes between ways of loading or using one model (dtype, attention implementation, names,
    versions, how long a context is allowed), and the weights, of which a cache sees nothing.

    Args:
        model_config: the text part of a transformers configuration (``get_text_config(decoder=True)``).

    Returns:
        Names to values; what the model does not have is left out.
    """
    values = model_config.to_dict()
    other_names = getattr(model_config, "attribute_map", {})  # GPT-2 calls its num_hidden_layers n_layer
    names = [*_FIELDS, *sorted(name for name in values if _MORE_FIELDS.fullmatch(name))]
    found = {name: values.get(other_names.get(name, name)) for name in names}
    return json.loads(json.dumps({name: value for name, value in found.items() if value is not None}, default=str))


def model_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first thing that two fingerprints do not agree in, in words; None: they are of one model."""
    return next(_differences(there, here), None)


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What two fingerprints do not agree in. What one of them does not know is no difference.

    A configuration out of a GGUF file, or of another version of transformers, may spell out more or less.
    """
    for name, value in there.items():
        other = here.get(name)
        if value is None or other is None:
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differences(value, other, f"{path}{name}.")
        elif name == "vocab_size" and math.isclose(value, other, rel_tol=_VOCABULARY_TOLERANCE):
            continue
        elif value != other:
            if isinstance(value, list):
                yield f"{path}{name} is not the same"
            else:
                yield f"{path}{name} is {value} there and {other} here"


def _parse(name: str) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"scales: {name!r} is no name of a scale; use layers.<i>.key_scale or .value_scale (or .key_centre and "
            ".key_multiplier)"
        )
    return int(match[1]), match[2]


def _checked(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in float32, each of which and all of which in a layer are as they should be."""
    tensors = {}
    shapes: dict[int, dict[str, torch.Size]] = {}
    for name, given in found.items():
        index, kind = _parse(name)
        tensor = torch.as_tensor(given).detach().to(torch.float32).clone()
        if tensor.dim() != (1 if KINDS[kind] == "[kv_heads]" else 2):
            raise ValueError(f"scales: {name} must be {KINDS[kind]}, not {list(tensor.shape)}")
        if not bool(tensor.isfinite().all()):
            what = "finite" if kind == "key_centre" else "positive and finite"
            raise ValueError(f"scales: {name} must be {what}")
        if kind != "key_centre" and not bool((tensor > 0).all()):
            raise ValueError(f"scales: {name} must be positive and finite")
        tensors[name] = tensor
        shapes.setdefault(index, {})[kind] = tensor.shape
    for index, kinds in shapes.items():
        for position, size in enumerate(("kv_heads", "key_dim")):
            found_sizes = {kind: shape[position] for kind, shape in kinds.items() if len(shape) > position}
            if len(set(found_sizes.values())) > 1:
                listed = ", ".join(f"{count} in {kind}" for kind, count in found_sizes.items())
                raise ValueError(f"scales: the tensors of layer {index} differ in {size}: {listed}")
    return tensors
