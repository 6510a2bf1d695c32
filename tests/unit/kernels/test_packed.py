"""Packed weights: the bits of products in blocks of rows, whatever the number of rows, or no packed weight at all."""

import pytest
import torch

from lowlat.kernels.reference.gemm import packed as module
from lowlat.kernels.reference.gemm.linear import linear, packed_linear
from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK, linear_block
from lowlat.kernels.reference.gemm.packed import LEAST_ELEMENTS, PackedWeight, pack


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers as bf16 has them, in float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@pytest.mark.parametrize(("width", "depth"), [(960, 576), (512, 1536), (4096, 320), (1001, 300), (2048, 130)])
def test_packed_rows_have_the_bits_of_blocks(width: int, depth: int) -> None:
    weight, x = drawn(width, depth), drawn(19, depth, seed=1)
    if (packed := pack(weight)) is None:
        pytest.skip("this processor adds in another order than packed weights do")
    for rows in (1, 2, 7, 8, 19):
        expected, found = torch.empty(2, rows, width)
        linear(x[:rows], weight, out=expected)
        packed_linear(x[:rows], packed, out=found, row_block=ROW_BLOCK)
        assert torch.equal(expected, found), rows


def test_a_weight_of_other_bits_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(512, 1536)
    assert not PackedWeight(weight, 97).agrees(weight)  # parts of K that no library adds up
    monkeypatch.setattr(module, "_part_of", lambda depth, threads: 97)
    assert pack(weight) is None


def test_small_and_narrow_weights_stay_as_they_are() -> None:
    assert pack(drawn(LEAST_ELEMENTS // 64 - 1, 64)) is None
    assert pack(drawn(512, 1536).bfloat16()) is None
    assert linear_block(drawn(ROW_BLOCK, 64), drawn(32, 64, seed=1)).shape == (ROW_BLOCK, 32)
