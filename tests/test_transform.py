"""Rotations: orthogonal, the same always, and for every head size."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from qkv.transform import Transform, hadamard, rotation_block, rotation_signs


def test_a_rotation_is_the_hadamard_matrix_of_each_block_behind_signs_and_keeps_lengths_for_every_head_size() -> None:
    for dim in range(1, 301):
        rotation = Transform(rotation_signs(dim))
        block = rotation_block(dim)
        assert block == oracle.rotation_block(dim)
        # Each row of the identity becomes a column of the matrix.
        matrix = rotation.forward(torch.eye(dim)[None, None])[0, 0].T.double()
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-6)
        if dim % 16 == 0 or dim < 20:
            np.testing.assert_allclose(matrix.numpy(), oracle.rotation_matrix(dim), rtol=0, atol=1e-7)
        x = torch.randn(1, 2, 3, dim, generator=torch.Generator().manual_seed(dim))
        turned = rotation.forward(x)
        torch.testing.assert_close(rotation.inverse(turned), x, rtol=0, atol=1e-5)
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dim", [1, 2, 6, 16, 80, 96, 112, 128, 256])
def test_a_rotation_equals_the_oracle_bit_for_bit_and_without_signs_is_its_own_inverse(dim: int) -> None:
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(dim))
    turned = hadamard(x, rotation_block(dim))
    np.testing.assert_array_equal(turned.numpy(), oracle.hadamard(x.numpy()))
    torch.testing.assert_close(hadamard(turned, rotation_block(dim)), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (96, 32), (112, 16), (128, 128), (192, 64), (7, 1)])
def test_heads_that_are_no_power_of_two_are_rotated_in_blocks(dim: int, block: int) -> None:
    """Case 9."""
    assert rotation_block(dim) == block
    x = torch.zeros(1, 1, 1, dim)
    x[..., dim - 1] = 1.0
    turned = Transform(rotation_signs(dim)).forward(x).flatten()
    assert not bool(turned[: dim - block].any())
    assert turned[dim - block :].abs().tolist() == pytest.approx([block**-0.5] * block)


def test_the_signs_of_a_rotation_are_the_same_always() -> None:
    """What was stored with one rotation must not be read with another: case 18."""
    signs = [1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, 1, 1, 1]
    assert rotation_signs(16).tolist() == signs
    for dim in (1, 64, 80, 300):
        assert rotation_signs(dim).tolist() == oracle.rotation_signs(dim).tolist()
