"""What a cache hands to attention: the stored tokens of one layer, not decoded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from qkv.storage import Late, LayerStore, Run


class KVView:
    """The keys and values of one layer as they are stored, at one moment.

    A view does not copy: it is good until the next update of its layer.

    Attributes:
        store: the layer's store.
        first: position of the first token that is shown.
        length: tokens shown, kv_len.
        late: exact copies that early queries of the current pass need, see :class:`qkv.storage.Late`; usually None.
        on_served: told the name of the backend that attended, or None.
        window: tokens that one query sees, where that may be fewer than are shown, see sinks.py; None: all.
    """

    __slots__ = ("_changes", "_runs", "first", "late", "length", "on_served", "store", "window")

    def __init__(
        self,
        store: LayerStore,
        late: Late | None = None,
        first: int | None = None,
    ):
        self.store = store
        self.first = store.first if first is None else max(first, store.first)
        self.length = store.length - self.first
        self._changes = store.changes
        self.on_served: Callable[[str], None] | None = None
        self.window: int | None = None
        # A sliding window goes on after this view is made: what it shows is written down now.
        self._runs: list[Run] | None = store.runs(self.first) if first is not None else None
        if late is not None:
            late = late.from_position(self.first)
        if late is not None and store.config.prefill == "exact":
            runs = self._runs if self._runs is not None else store.runs(self.first)
            self._runs, late = _with_exact(runs, self.first, late), None
        self.late = late

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(batch, kv_heads, key_dim, value_dim)``."""
        if self.store.shape is None:
            raise ValueError("the cache layer is empty: there is nothing to attend to")
        return self.store.shape

    @property
    def dtype(self) -> torch.dtype:
        """The model's own type, which :meth:`decode` gives."""
        return self.store.dtype

    @property
    def device(self) -> torch.device:
        return self.store.device

    @property
    def runs_changed(self) -> bool:
        """Whether the runs of this view differ from those of its store."""
        return self._runs is not None

    @property
    def stale(self) -> bool:
        """Whether the layer was updated since this view was made."""
        return self.store.changes != self._changes

    def check(self) -> None:
        """What comes before reading: tokens that lie on another device are brought.

        Raises:
            RuntimeError: the layer was updated since this view was made.
        """
        if self.stale:
            raise RuntimeError(
                f"this view of {self.length} tokens is out of date: its cache layer was updated since and holds "
                f"{self.store.length} tokens by now"
            )
        if self.store.elsewhere is not None:
            segments = self.store.packed if self._runs is None else (run.segment for run in self._runs)
            self.store.elsewhere.bring(self.store, segments)

    def runs(self) -> list[Run]:
        """The stored tokens in the order of their positions.

        Raises:
            RuntimeError: the layer was updated since this view was made.
        """
        self.check()
        return self._runs if self._runs is not None else self.store.runs(self.first)

    def columns(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The part of an attention mask ``[..., kv_len]`` that is about the tokens shown.

        In a static layout a mask is about all positions from 0 on.
        """
        if mask is None or self.store.capacity is None:
            return mask
        return mask[..., self.first : self.first + self.length]

    @property
    def handed_length(self) -> int:
        """Tokens that keys and values have for the model: kv_len, or all that may come in a static layout."""
        return self.length if self.store.capacity is None else self.store.capacity

    def decode_for_model(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, kv_heads, handed_length, head_dim]`` in the model's own type.

        In a static layout every token is at its position, and there are zeros where there is no token.
        """
        keys, values = self.decode()
        if self.store.capacity is None:
            return keys, values
        around = (0, 0, self.first, self.store.capacity - self.first - self.length)
        return pad(keys, around), pad(values, around)

    def decode(
        self, dtype: torch.dtype | None = None, start: int = 0, end: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as ordinary tensors, ``[batch, kv_heads, tokens, head_dim]``, newly allocated.

        Args:
            dtype: type of the result; None: the model's own.
            start, end: which of the tokens shown; None: to the last one.
        """
        batch, heads, key_dim, value_dim = self.shape
        dtype = dtype or self.dtype
        end = self.length if end is None else end
        keys = torch.empty(batch, heads, end - start, key_dim, dtype=dtype, device=self.device)
        values = torch.empty(batch, heads, end - start, value_dim, dtype=dtype, device=self.device)
        at = -start
        for run in self.runs():
            low, high = max(0, at), min(end - start, at + run.length)
            if low < high:
                offset = run.offset + low - at
                run.segment.key.decode_into(keys[:, :, low:high], offset)
                run.segment.value.decode_into(values[:, :, low:high], offset)
            at += run.length
        return keys, values


def _with_exact(runs: list[Run], position: int, late: Late) -> list[Run]:
    """The runs, the first token at ``position``, with the tokens of ``late`` taken from its exact copies."""
    result, placed = [], False
    for run in runs:
        end = position + run.length
        packed = run.segment.key.format is not None or run.segment.value.format is not None
        if packed and end > late.first:
            if position < late.first:
                result.append(Run(run.segment, run.offset, late.first - position))
            if not placed:
                result.append(Run(late.segment, 0, late.segment.length))
                placed = True
        else:
            result.append(run)
        position = end
    return result
