"""What a full cache keeps of the beginning: the first tokens, exact, moved along with the window behind them.

Attention has learnt to leave on the first tokens what it has no use for; a model goes wrong as soon as they leave
(Xiao et al. 2023, arXiv 2309.17453, "StreamingLLM"). They stay, and everything between them and the window goes.

The keys are turned by their positions (RoPE). Of the tokens in the window that stays as it is: between them and a query
only the distance counts. The distance of the first tokens would grow beyond anything that the model has seen, so they
are turned forward by as many positions as tokens are gone: they sit right before the window. They are turned anew from
the keys as they came, in double precision, each time: nothing accumulates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qkv.planes import Plane, Segment
from qkv.storage import Late, LayerStore, Run
from qkv.view import KVView

# How many tokens a full cache keeps of the beginning, unless told otherwise.
SINK_TOKENS = 4


@dataclass
class Turning:
    """How positions turn the keys of a layer. Layers that are alike share one.

    Attributes:
        first, second: the two channels of each pair.
        frequencies: float64 ``[pairs]``, radians per position.
    """

    first: slice
    second: slice
    frequencies: torch.Tensor

    def __post_init__(self) -> None:
        self._last: tuple[int, torch.Tensor] | None = None

    def phase(self, positions: int) -> torch.Tensor:
        """What pairs are multiplied with to go ``positions`` forward: complex128 ``[pairs]``."""
        if self._last is None or self._last[0] != positions:  # layers ask one after the other
            self._last = (positions, self.phases(torch.tensor(positions, device=self.frequencies.device)))
        return self._last[1]

    def phases(self, positions: torch.Tensor) -> torch.Tensor:
        """As :meth:`phase` for positions of any shape: complex128 ``[..., pairs]``."""
        angles = positions.double().unsqueeze(-1) * self.frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def pairs(self, x: torch.Tensor) -> torch.Tensor:
        """The pairs of ``x [..., dim]`` as complex128 ``[..., pairs]``."""
        return torch.complex(x[..., self.first].double(), x[..., self.second].double())

    def put(self, pairs: torch.Tensor, x: torch.Tensor) -> None:
        """Writes pairs to where they belong in ``x``."""
        x[..., self.first] = pairs.real.to(x.dtype)
        x[..., self.second] = pairs.imag.to(x.dtype)

    def same(self, other: Turning | None) -> bool:
        """Whether another turns alike."""
        if other is None or (self.first, self.second) != (other.first, other.second):
            return False
        return torch.equal(self.frequencies, other.frequencies)

    def to(self, device: torch.device) -> Turning:
        """The same on another device."""
        if self.frequencies.device == device:
            return self
        return Turning(self.first, self.second, self.frequencies.to(device))


class Sinks:
    """The first tokens of one layer.

    Args:
        count: how many.
        turning: how positions turn keys; None: they do not.

    Attributes:
        length: tokens that are there.
    """

    def __init__(self, count: int, turning: Turning | None):
        self.count, self.turning = count, turning
        self.segment: Segment | None = None
        self._pairs: torch.Tensor | None = None  # of the keys as they came
        self._by = 0  # positions that the keys in the segment are turned by

    @property
    def length(self) -> int:
        return self.segment.length if self.segment is not None else 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes tokens, no more than there is room for: ``[batch, kv_heads, n, dim]``."""
        if keys.shape[2] == 0:
            return
        with torch.inference_mode(False), torch.no_grad():  # what is made here is written in any mode
            keys, values = keys.detach(), values.detach()
            if self.segment is None:
                planes = (Plane(keys, self.count, None, True), Plane(values, self.count, None, False))
                self.segment = Segment(*planes, self.count)
            self.turn(0)
            self.segment.append(keys, values)
            if self.turning is not None and not keys.is_meta:
                self.turning = self.turning.to(keys.device)
                self._pairs = self.turning.pairs(self.segment.rows(self.segment.length)[0])

    def turn(self, positions: int) -> None:
        """Turns the keys to ``positions`` behind where they came."""
        if self._pairs is None or positions == self._by or self.segment is None or self.turning is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.turning.put(self._pairs * self.turning.phase(positions), self.segment.rows(self.length)[0])
        self._by = positions

    def original(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as they came, and values, ``[batch, kv_heads, length, dim]``."""
        assert self.segment is not None
        self.turn(0)
        keys, values = self.segment.rows(self.length)
        return keys.to(dtype), values.to(dtype)

    def written_down(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`original`, of the type they have, copied: what is held stays turned as it is."""
        assert self.segment is not None
        keys, values = (rows.clone() for rows in self.segment.rows(self.length))
        if self._pairs is not None and self.turning is not None:
            self.turning.put(self._pairs, keys)
        return keys, values

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` tokens."""
        if self.segment is None or length >= self.length:
            return
        self.segment.length = length
        if self._pairs is not None:
            self._pairs = self._pairs[:, :, :length].contiguous()  # as they lie where nothing was ever cropped

    def clear(self) -> None:
        """Forgets all."""
        self.segment = self._pairs = None
        self._by = 0

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by ``function`` of it."""
        if self.segment is not None:
            self.segment = self.segment.mapped(function)
        if self._pairs is not None:
            self._pairs = function(self._pairs)

    def nbytes(self) -> int:
        """Bytes allocated, the keys as they came included."""
        planes = self.segment.planes() if self.segment is not None else ()
        held = [t for plane in planes for t in plane.tensors()]
        return sum(t.untyped_storage().nbytes() for t in (*held, *([] if self._pairs is None else [self._pairs])))

    def bits(self) -> int:
        """Bits of the tokens, without the copy of the keys."""
        planes = self.segment.planes() if self.segment is not None else ()
        return sum(plane.bits(0, self.length) for plane in planes)


class WindowView(KVView):
    """The first tokens, and those from ``first`` on, as one: column ``c`` stands for position ``self.first + c``.

    The first tokens are shown at the positions right before the others.

    Args:
        store: of the tokens behind the first ones; its positions begin behind them.
        late: as in :class:`~qkv.view.KVView`.
        first: position, in the store, of the first token that is shown.
        sinks: the first tokens.
        window: tokens of the store that one query sees, its own included.

    Attributes:
        by: positions that the first tokens are moved forward.
    """

    __slots__ = ("by", "sinks")

    def __init__(self, store: LayerStore, late: Late | None, first: int, sinks: Sinks, window: int):
        super().__init__(store, late, first)
        self.sinks, self.window = sinks, window
        self.by = self.first
        self.first -= sinks.length
        self.length += sinks.length

    def runs(self) -> list[Run]:
        self.check()
        assert self._runs is not None
        if self.sinks.segment is None or not self.sinks.length:
            return self._runs
        self.sinks.turn(self.by)
        return [Run(self.sinks.segment, 0, self.sinks.length), *self._runs]

    def columns(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask as it is.

        Raises:
            ValueError: it hides some of the first tokens, which are padding in some row, and tokens have left; or it is
                as wide as the text, where tokens have left.
        """
        if mask is None:
            return mask
        if self.by and mask.shape[-1] != self.length:
            raise ValueError(
                f"the cache is full and holds {self.length} tokens, and a mask or position bias came for "
                f"{mask.shape[-1]}: on_full='window' does not serve models that make such for the whole text; use "
                "on_full='error' or 'offload'"
            )
        if self.sinks.length and (self.by or self.passes_window):
            last = mask[..., -1, : self.sinks.length]
            hidden = ~last if last.dtype == torch.bool else last <= torch.finfo(last.dtype).min
            if bool(hidden.any()):
                raise ValueError(
                    f"the cache is full, and of the first {self.sinks.length} tokens, which it keeps, some are "
                    "padding: give sequences of one length, or one sequence at a time, or a larger max_tokens"
                )
        return mask

    @property
    def passes_window(self) -> bool:
        """Whether the last query of the pass does not see all that the first one could."""
        return self.window is not None and self.store.length > self.window
