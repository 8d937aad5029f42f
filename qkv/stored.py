"""A layer's store as plain values and named tensors, to be written down and made again.

What is full, or closed, is written as it lies in memory, and serves again from where it was read: a mapped file, say.
What may still take tokens is written without its spare room, and made anew with as much of it as it had, so that the
store goes on as if it had never been away: segments end where they would have ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import copy
from typing import Any

import torch

from qkv.formats.base import Format
from qkv.formats.layout import layout_for
from qkv.planes import Plane, Segment
from qkv.sinks import Sinks
from qkv.storage import LARGE_STORE_TOKENS, LayerStore
from qkv.transform import rotation_block

# Behind packed codes lies room that the kernels may load from, see Layout.empty.
_SPARE_BYTES = 64
_EXACT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
)}  # fmt: skip

# Gives the tensor of a name, of this type and shape; ValueError where it is not there, or another.
Take = Callable[[str, torch.dtype, tuple[int, ...]], torch.Tensor]


def describe(store: LayerStore) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Everything that a store knows.

    Returns:
        Values that JSON knows, and tensors by name: those of the store where it does not write to them any more, else
        copies. Codes are flat, uint8, with the spare bytes behind them.
    """
    facts = _facts(store)
    if store.shape is None:
        return {**facts, "shape": None}, {}
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {
        **facts,
        "shape": list(store.shape),
        "dtype": str(store.dtype).removeprefix("torch."),
        "length": store.length,
        "first": store.first,
        "encoded": store._encoded,
        "open": store._open,
        "packed": [_place(segment) for segment in store.packed],
        "rotation": [_rotation(store, side) for side in (0, 1)],
        "layouts": [_layout(store, side) for side in (0, 1)],
    }
    for name, segment in (("sink", store.sink), ("residual", store.residual)):
        state[name] = None if segment is None else _place(segment)
        if segment is not None:
            tensors[f"{name}.key"], tensors[f"{name}.value"] = segment.rows(segment.length)
    for i, segment in enumerate(store.packed):
        for side, plane in zip(("key", "value"), segment.planes(), strict=True):
            for part, tensor in _parts(plane if segment.room == 0 else _trimmed(plane, segment)).items():
                tensors[f"packed.{i}.{side}.{part}"] = tensor
    vectors = {name: None if x is None else getattr(x, name) for x in store._transforms[:1] for name in _VECTORS}
    tensors |= {f"key_{name}": x for name, x in vectors.items() if x is not None}
    state["vectors"] = [name for name, x in vectors.items() if x is not None]
    for side, scale in (("key", store._key_head), ("value", store._value_head)):
        held = {} if scale is None or scale.given else {"current": scale.current, "first": scale._first}
        if scale is not None and scale.current is scale._first:
            held.pop("first", None)
        tensors |= {f"{side}_scale.{name}": x for name, x in held.items() if x is not None}
        state[f"{side}_scale"] = [name for name, x in held.items() if x is not None]
    return state, tensors


def restore(store: LayerStore, state: dict[str, Any], take: Take, device: torch.device) -> None:
    """Makes an empty store what another was when :func:`describe` described it.

    Args:
        store: new, made of the same description.
        state: the values.
        take: gives the tensors; closed segments hold on to them and write nothing to them.
        device: where the tokens are to lie.

    Raises:
        ValueError: values that do not go with the store, or with each other; it may then be in any state.
        KeyError, TypeError: values that are missing, or of another type.
    """
    for name, here in _facts(store).items():
        if state[name] != here:
            raise ValueError(f"{name.replace('_', ' ')} is {state[name]} there and {here} here")
    if state["shape"] is None:
        return
    batch, heads, key_dim, value_dim = (whole(n, 1) for n in state["shape"])
    dtype = _EXACT_DTYPES[state["dtype"]]
    empty = [torch.empty(batch, heads, 0, dim, dtype=dtype, device=device) for dim in (key_dim, value_dim)]
    store.check(*empty)
    store._begin(*empty)
    vectors = {name: take(f"key_{name}", torch.float32, (heads, key_dim)).clone() for name in state["vectors"]}
    if vectors:
        store._set_transforms(vectors.get("centre"), vectors.get("multiplier"))
    elif state["encoded"] and store._equalizes:
        raise ValueError("the vectors that keys are equalized by are missing")
    for side, what in ((0, "keys"), (1, "values")):
        if state["rotation"][side] != _rotation(store, side):
            raise ValueError(f"{what} were rotated in another way than they are now")
        if state["layouts"][side] != _layout(store, side):
            raise ValueError(f"codes of {what} lie in the order of another device than {device.type}")
    for word, scale in (("key", store._key_head), ("value", store._value_head)):
        names = state[f"{word}_scale"]
        if scale is not None and not scale.given and names:
            held = {name: take(f"{word}_scale.{name}", torch.float32, (batch, heads)).clone() for name in names}
            scale.current = held["current"]
            scale._first = held.get("first", scale.current)
    for name in ("sink", "residual"):
        if state[name] is not None:
            start, length, capacity = _checked_place(store, state[name])
            made = (Plane(empty[0], capacity, None, True), Plane(empty[1], capacity, None, False))
            segment = Segment(*made, capacity, length, start)
            for word, rows in zip(("key", "value"), segment.rows(length), strict=True):
                rows.copy_(take(f"{name}.{word}", dtype, (batch, heads, length, rows.shape[3])))
            setattr(store, name, segment)
    store.packed = _packed(store, state["packed"], take, empty)
    store.packed_length = sum(segment.length for segment in store.packed)
    store.length, store.first = whole(state["length"]), whole(state["first"])
    store._encoded, store._open = bool(state["encoded"]), bool(state["open"])
    tokens = sum(segment.length for segment in store.segments())
    too_long = store.capacity is not None and store.length > store.capacity
    if tokens != store.length - store.first or too_long or (store._open and not store.packed):
        raise ValueError(f"{tokens} tokens do not make a store of positions {store.first} to {store.length}")
    store.version += 1
    store.changes += 1


def describe_sinks(sinks: Sinks) -> tuple[int, dict[str, torch.Tensor]]:
    """The first tokens of a layer that forgets: how many there are, and their keys as they came, and values."""
    if sinks.length == 0:
        return 0, {}
    keys, values = sinks.written_down()
    return sinks.length, {"sinks.key": keys, "sinks.value": values}


def restore_sinks(sinks: Sinks, store: LayerStore, length: Any, take: Take) -> None:
    """Makes empty first tokens what others were when :func:`describe_sinks` described them.

    Args:
        sinks: new, of the same description.
        store: what is behind them, restored.
        length: how many there were.
        take: gives the tensors, which are copied.

    Raises:
        ValueError: a number of tokens that does not go with what is behind them.
    """
    length = whole(length)
    if length > sinks.count or (store.length and length < sinks.count):
        raise ValueError(f"{length} first tokens do not go with {store.length} behind them, where {sinks.count} stay")
    if not length:
        return
    if store.shape is None:
        raise ValueError(f"of {length} first tokens the shape is missing")
    batch, heads, key_dim, value_dim = store.shape
    keys = take("sinks.key", store.dtype, (batch, heads, length, key_dim))
    values = take("sinks.value", store.dtype, (batch, heads, length, value_dim))
    sinks.append(keys, values)


def _packed(store: LayerStore, places: list[list[int]], take: Take, empty: list[torch.Tensor]) -> list[Segment]:
    made = []
    kinds: dict[tuple[int, int], tuple[Plane, list[tuple[str, torch.dtype, tuple[int, ...]]]]] = {}
    on_cpu = empty[0].device.type == "cpu"
    for i, place in enumerate(places):
        start, length, capacity = _checked_place(store, place)
        whole = start + length == capacity
        planes = []
        for side in (0, 1):
            format = (store.key_format, store.value_format)[side]
            scaling, transform = store.scalings[side], store._transforms[side]
            together = scaling.tokens if scaling is not None else 1
            tokens = -(-(start + length) // together) * together
            if (tokens, side) not in kinds:
                # Its shapes are all that is wanted.
                rows = empty[side].to("meta") if on_cpu else empty[side]
                kind = Plane(rows, tokens, format, side == 0, scaling, None, transform)
                kinds[tokens, side] = kind, _shapes(kind)
            kind, shapes = kinds[tokens, side]
            name = f"packed.{i}.{('key', 'value')[side]}"
            parts = {part: take(f"{name}.{part}", dtype, shape) for part, dtype, shape in shapes}
            if kind.layout is not None:
                parts["codes"] = parts["codes"][: kind.codes.numel()].view(kind.codes.shape)
            held = Plane.of_tensors(kind, parts["codes"], parts.get("scale"), parts.get("offset"))
            if not whole:
                scale = None if scaling is None or scaling.granularity != "head" else parts["scale"].clone()
                fresh = Plane(empty[side], capacity, format, side == 0, scaling, scale, transform)
                for old, new in zip(held.tensors(), fresh.tensors(), strict=True):
                    new[tuple(slice(n) for n in old.shape)] = old
                held = fresh
            planes.append(held)
        segment = Segment(planes[0], planes[1], capacity, length, start)
        segment.shared = whole
        made.append(segment)
    return made


_VECTORS = ("centre", "multiplier")


def _facts(store: LayerStore) -> dict[str, Any]:
    """What a store must agree in with the one that was written down: how numbers are stored."""
    return {
        "key_format": _of_format(store.key_format),
        "value_format": _of_format(store.value_format),
        "key_granularity": store.key_granularity,
        "value_granularity": store.value_granularity,
        "tokens_encoded_together": store.group,
        "equalizing": store._equalizes,
    }


def _of_format(format: Format | None) -> list[Any] | None:
    """What codes of a format mean, as far as it can be told."""
    if format is None:
        return None
    table = None if format.table is None else zlib.crc32(torch.tensor(format.table).numpy().tobytes())
    numbers = [format.bits, str(format.code_dtype), float(format.largest), format.block, format.clip, table]
    return [format.name, *numbers, format.scale_type.name, format.offset, format.rotated]


def _rotation(store: LayerStore, side: int) -> list[int] | None:
    """Channels that are rotated together, and a checksum of the signs; None: no rotation (yet)."""
    transform = store._transforms[side]
    if transform is None or transform.signs is None:
        return None
    signs = transform.signs.to("cpu", torch.float32).contiguous()
    return [rotation_block(signs.numel()), zlib.crc32(signs.numpy().tobytes())]


def _layout(store: LayerStore, side: int) -> list[int] | None:
    format = (store.key_format, store.value_format)[side]
    if format is None:
        return None
    layout = layout_for(store.device, side == 0, format.bits)
    return [layout.tile, layout.channels, layout.bits]


def _place(segment: Segment) -> list[int]:
    return [segment.start, segment.length, segment.capacity]


def _checked_place(store: LayerStore, place: list[int]) -> tuple[int, int, int]:
    start, length, capacity = (whole(n) for n in place)
    exact = store.config.residual_length + store.config.sink_tokens + store.warm + store.group
    most_room = 2 * (exact + (store.capacity or 0)) + LARGE_STORE_TOKENS  # room is memory: more than there ever is
    if not start + length <= capacity <= start + length + most_room:
        raise ValueError(f"a segment with room for {capacity} tokens cannot hold {start} + {length}")
    return start, length, capacity


def whole(number: Any, least: int = 0) -> int:
    """The number, if it is a whole one of at least ``least``; else raises ValueError."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{number!r} is no whole number of at least {least}")
    return number


def _trimmed(plane: Plane, segment: Segment) -> Plane:
    """A copy without the room behind the last token, in which nothing of tokens that were taken back is left."""
    used = segment.start + segment.length
    fresh = copy(plane)
    fresh.shrink(used)
    if fresh.layout is not None:
        behind = fresh.codes.shape[2] * fresh.layout.tile - used
        if behind:
            batch, heads = fresh.codes.shape[:2]
            zeros = torch.zeros(batch, heads, behind, fresh.dim, dtype=torch.uint8, device=fresh.codes.device)
            fresh.layout.write(fresh.codes, used, zeros)
    return fresh


def _parts(plane: Plane) -> dict[str, torch.Tensor]:
    """The tensors of a plane by name, as they are written down."""
    parts = {"codes": plane.codes}
    if plane.layout is not None:
        codes = plane.codes.contiguous()
        size = codes.numel() + _SPARE_BYTES
        if codes.untyped_storage().nbytes() - codes.storage_offset() >= size:
            parts["codes"] = codes.as_strided((size,), (1,))
        else:
            parts["codes"] = torch.cat([codes.flatten(), codes.new_zeros(_SPARE_BYTES)])
    if plane.scale is not None:
        parts["scale"] = plane.scale
    if plane.offset is not None:
        parts["offset"] = plane.offset
    return parts


def _shapes(plane: Plane) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes of what :func:`_parts` gives for a plane of this kind; of a scale per head as well."""
    batch, heads = plane.codes.shape[:2]
    codes = tuple(plane.codes.shape) if plane.layout is None else (plane.codes.numel() + _SPARE_BYTES,)
    found = [("codes", plane.codes.dtype, codes)]
    if plane.scaling is not None and plane.scaling.granularity == "head":
        found.append(("scale", torch.float32, (batch, heads)))
    for name, x in (("scale", plane.scale), ("offset", plane.offset)):
        if x is not None:
            found.append((name, x.dtype, tuple(x.shape)))
    return found
