"""The product's meaning, and that a row's bits depend neither on its place nor on its company."""

import pytest
import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.gemm.linear import linear, linear_block

SHAPES = [
    *[(1, 1), (2, 21), (3, 722), (5, 7), (6, 5), (7, 14), (8, 213), (11, 25), (13, 33), (33, 97), (63, 64)],
    *[(64, 31), (65, 100), (79, 17), (97, 33), (129, 301), (500, 129), (1001, 96), (96, 1001), (257, 2048)],
]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, block: int = 8) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), device=x.device)
    linear(x, weight, bias, out=out, row_block=block)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_at_every_place(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    width, depth = shape
    generator = torch.Generator().manual_seed(width * 10_007 + depth)
    weight = torch.randn(width, depth, generator=generator).to(device, dtype)
    bias = torch.randn(width, generator=generator).to(device, dtype)
    row = torch.randn(depth, generator=generator).to(device, dtype)
    alone = product(row[None], weight, bias)[0]
    for rows in (2, 7, 8, 9, 23):
        for place in sorted({*range(min(rows, 9)), rows - 1}):
            x = torch.randn(rows, depth, generator=generator).mul(10).to(device, dtype)
            x[place] = row
            assert torch.equal(product(x, weight, bias)[place], alone), (rows, place)


@pytest.mark.parametrize("shape", [(40, 50), (64, 17), (300, 70)])
def test_a_bad_neighbour_stays_alone(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(*shape), torch.randn(8, shape[1])
    expected = product(x, weight)
    x[3] = float("nan")
    x[5, 0] = float("inf")
    got = product(x, weight)
    for place in (0, 1, 2, 4, 6, 7):
        assert torch.equal(got[place], expected[place])
    assert bool(got[3].isnan().all())


def test_random_shapes_and_every_place() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(150):
        width, depth = (int(torch.randint(1, 260, (), generator=generator)) for _ in range(2))
        weight = torch.randn(width, depth, generator=generator)
        row = torch.randn(depth, generator=generator)
        alone = linear_block(row[None], weight)[0]
        x = torch.randn(8, depth, generator=generator)
        for place in range(8):
            block = x.clone()
            block[place] = row
            assert torch.equal(linear_block(block, weight)[place], alone), (width, depth, place)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("block", [8, 13])
def test_it_is_the_product(dtype: torch.dtype, tolerance: float, block: int, device: str) -> None:
    for width, depth in ((3, 40), (64, 64), (77, 130), (160, 96)):
        x, weight = torch.randn(13, depth).to(device, dtype), torch.randn(width, depth).to(device, dtype)
        bias = torch.randn(width).to(device, dtype)
        expected = x.double() @ weight.double().t() + bias.double()
        error = (product(x, weight, bias, block).double() - expected).norm() / expected.norm()
        assert float(error) < tolerance
        assert torch.equal(product(x, weight, bias, block), product(x, weight, None, block) + bias.float())


def test_a_view_gives_the_bits_of_its_copy() -> None:
    wide, weight = torch.randn(9, 101), torch.randn(70, 37)
    assert torch.equal(product(wide[:, 3:40], weight), product(wide[:, 3:40].clone(), weight))
    assert product(torch.randn(0, 37), weight).shape == (0, 70)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="at most 8 rows"):
        linear_block(torch.zeros(9, 4), torch.zeros(3, 4))
    with pytest.raises(ShapeError, match="weight"):
        linear_block(torch.zeros(2, 4), torch.zeros(3, 5))
    with pytest.raises(ShapeError, match="out"):
        linear(torch.zeros(2, 4), torch.zeros(3, 4), out=torch.zeros(2, 4))
    with pytest.raises(ShapeError, match="bias"):
        linear(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(1), out=torch.zeros(2, 3))
