"""A full cache that goes on: the first tokens and a window of the last ones (``on_full="window"``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qkv.config import CacheConfig
from qkv.layers import QKVLayer
from qkv.native import SlowPathWarning
from qkv.sinks import Sinks, Turning, WindowView
from qkv.storage import LayerStore


class QKVWindowLayer(QKVLayer):
    """The cache of an attention layer of which the first tokens and the last ones stay, see sinks.py.

    A query sees ``max_tokens`` tokens, its own included: the first ones, and the last before it. In a pass of several
    tokens each has a window of its own, and the tokens of the pass are held beside the window until it ends. Where the
    model's own attention serves (without ``qkv.enable``), the queries of one pass share the window of the first.

    Args:
        config: how to store; its ``sink_tokens`` first tokens stay.
        max_tokens: tokens to hold; None: told later, by :meth:`set_window`.
        turning: how positions turn keys; None: they do not.
        positions: of a model with a table of positions, how many there are; None: there is none.
        others, more: as :class:`QKVLayer`.
    """

    def __init__(
        self,
        config: CacheConfig,
        *others: Any,
        max_tokens: int | None = None,
        turning: Turning | None = None,
        positions: int | None = None,
        **more: Any,
    ):
        kept = replace(config, sink_tokens=0, layers={})
        super().__init__(kept, *others, **more)
        store = self.store
        # The first tokens are not in the store: what leaves in front of it are others.
        self.store = LayerStore(kept, *store._given, True, None, *store._vectors, store._rotary)
        self.sinks = Sinks(config.sink_tokens, turning)
        self.positions = positions
        self.record_past = False
        self._window: int | None = None
        if max_tokens is not None:
            self.set_window(max_tokens - config.sink_tokens)

    def set_window(self, tokens: int) -> None:
        """Says how many of the last tokens stay, at least 1."""
        self._window = tokens

    def narrow(self, tokens: int) -> None:
        """Makes the window shorter, if it is longer than that, and lets go what is out of it. Not within a pass.

        Views made before go on to show what they showed.
        """
        if self._window is not None and tokens < self._window:
            self._window = tokens
            if not self.record_past:
                self.store.drop_before(self.store.length - tokens)

    @property
    def window(self) -> int:
        """Tokens behind the first ones that stay, and that a query sees, its own included."""
        if self._window is None:
            raise RuntimeError("the size of the window is not known before the cache's first update")
        return self._window

    def activate_past_recording(self) -> None:
        """From now on tokens leave only when :meth:`crop` is called, so that it can go back."""
        self.record_past = True

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> WindowView:
        keys, values = key_states, value_states
        if keys.dtype != values.dtype and torch.is_autocast_enabled(keys.device.type):
            wide = torch.promote_types(keys.dtype, values.dtype)  # as the store does
            keys, values = keys.to(wide), values.to(wide)
        self.store.check(keys, values)
        n = keys.shape[2]
        self._check_room(n, keys.shape[0])
        lacking = min(n, self.sinks.count - self.sinks.length)
        first = max(0, self.store.length - self.window + 1)
        late = self.store.append(keys[:, :, lacking:], values[:, :, lacking:])
        self.sinks.append(keys[:, :, :lacking], values[:, :, :lacking])
        view = WindowView(self.store, late, first, self.sinks, self.window)
        if not self.record_past:
            self.store.drop_before(self.store.length - self.window)
        return view

    def _check_room(self, n: int, batch: int) -> None:
        """Raises ValueError where ``n`` more tokens could not be served rightly."""
        total = self.get_seq_length() + n
        if self.positions is not None and total > self.positions:
            raise ValueError(
                f"the model has a table of {self.positions} positions, and {total} tokens would have come: a window "
                "lets only models with rotary positions go on beyond what they know"
            )
        if self.fused or total <= self.window + self.sinks.count:
            return
        if batch > 1:
            raise ValueError(
                f"the cache is full at {self.window + self.sinks.count} tokens, and whether the first ones of these "
                f"{batch} sequences are padding is only seen in qkv's attention: call qkv.enable(model), or give one "
                "sequence at a time"
            )
        if n > 1 and not self.said_unfused:
            self.said_unfused.append(True)
            warnings.warn(
                f"qkv: {n} tokens in one pass, and the cache is full: without qkv.enable(model) they all see what the "
                "first of them sees, and each other; with it, each has a window of its own",
                SlowPathWarning,
                stacklevel=5,
            )

    def _whole_view(self) -> WindowView:
        return WindowView(self.store, None, self.store.length - self.window, self.sinks, self.window)

    def append_now(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Not for layers that forget: they are not compiled."""
        raise RuntimeError("a cache with on_full='window' has no static layout")

    def get_seq_length(self) -> int:
        """Tokens that have come."""
        return self.sinks.length + self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of the mask for ``query_length`` new tokens.

        The first tokens count as those right before the window.
        """
        gone = max(0, self.store.length - self.window + 1) if self._window is not None else 0
        return self.get_seq_length() - gone + query_length, gone

    def reset(self) -> None:
        """Forgets all tokens and every scale that was not given."""
        self.sinks.clear()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, and then those in front that are out of the window.

        Args:
            tokens_to_remove: how many, as a negative number (transformers' convention).

        Raises:
            ValueError: a positive number.
            RuntimeError: tokens that would be seen again have left, see :meth:`activate_past_recording`.
        """
        self.check_crop(tokens_to_remove)
        left = max(0, self.get_seq_length() + tokens_to_remove)
        self.store.crop(max(0, left - self.sinks.count))
        self.sinks.crop(left)
        if left == 0:
            self.sinks.clear()
        elif self.store.shape is None and self.sinks.segment is not None:
            keys, values = self.sinks.segment.rows(0)
            self.store.append(keys, values)  # its shapes are still those
        if self._window is not None:
            self.store.drop_before(self.store.length - self._window)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises what :meth:`crop` would raise, and changes nothing."""
        super().check_crop(tokens_to_remove)
        left = max(0, self.get_seq_length() + tokens_to_remove)
        if tokens_to_remove and left and max(0, left - self.sinks.count - self.window + 1) < self.store.first:
            raise RuntimeError(
                f"cannot take back {-tokens_to_remove} tokens: the cache was full, and tokens that would be seen again "
                "have left; call activate_past_recording before the tokens come that are to be cropped"
            )

    def _map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_batch(function)
        self.sinks.map(function)

    def offload(self) -> None:
        """Not for these layers: a window is small."""
        raise RuntimeError("a cache with on_full='window' is not offloaded")

    def nbytes(self) -> int:
        """Bytes allocated, the first tokens included."""
        return super().nbytes() + self.sinks.nbytes()

    def stored_bits(self) -> int:
        """As :meth:`QKVLayer.stored_bits`."""
        return super().stored_bits() + self.sinks.bits()

    def stored_values(self) -> int:
        """As :meth:`QKVLayer.stored_values`."""
        shape = self.store.shape
        of_sinks = 0 if shape is None else self.sinks.length * shape[0] * shape[1] * (shape[2] + shape[3])
        return super().stored_values() + of_sinks

    def held(self) -> int:
        """Tokens that are held."""
        return super().held() + self.sinks.length
