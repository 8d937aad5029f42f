"""Signed 8-bit integers, symmetric: codes -127 .. 127."""

import torch

from qkv.formats.base import Format


class Int8(Format):
    """``x ~ code * scale`` with ``scale = max |x| / 127``: the error of a number is at most half a step.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "int8"
    bits = 8
    code_dtype = torch.int8
    largest = 127.0
    native_id = 3
    equalized = True

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        return torch.round(scaled).to(torch.int8)
