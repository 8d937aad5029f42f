"""8-bit floating point numbers as in the OCP specification "OCP 8-bit Floating Point Specification (OFP8)", 2023.

Their step grows with the number: the error is relative to each number and not to the largest one of its vector. For
cached keys and values, whose channels are of similar size, int8 with a scale per token is more accurate; these formats
are here because serving engines store them.
"""

import torch

from qkv.formats.base import Format


class Fp8E4M3(Format):
    """4 bits of exponent, 3 of mantissa, no infinities: largest number 448, relative error at most 2**-4.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "fp8_e4m3"
    bits = 8
    code_dtype = torch.float8_e4m3fn
    largest = 448.0
    native_id = 4

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.to(torch.float8_e4m3fn)


class Fp8E5M2(Format):
    """5 bits of exponent, 2 of mantissa: largest number 57,344, relative error at most 2**-3.

    Attributes: see :class:`~qkv.formats.base.Format`.
    """

    name = "fp8_e5m2"
    bits = 8
    code_dtype = torch.float8_e5m2
    largest = 57344.0
    native_id = 5

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.to(torch.float8_e5m2)
