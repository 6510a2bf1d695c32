"""Packed weights: back to the same matrix from any size, in any order, and what a lane finds where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.packing import (
    TILE_COLUMNS,
    TILE_ROWS,
    gate_up_permutation,
    gather_rows,
    pack,
    rope_permutation,
    unpack,
    unpack_rows,
)

sizes = st.integers(1, 150)


def matrix(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(sizes, sizes, st.sampled_from([torch.bfloat16, torch.float32]))
def test_unpacking_gives_the_matrix_back(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = matrix(rows, columns, rows * 1000 + columns, dtype)
    packed = pack(weight)
    assert (packed.rows, packed.columns) == (rows, columns)
    assert packed.tiles.shape == (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILE_ROWS * TILE_COLUMNS)
    assert packed.num_bytes == packed.tiles.numel() * dtype.itemsize
    assert torch.equal(unpack(packed), weight)
    assert unpack(packed).is_contiguous()
    assert torch.count_nonzero(packed.tiles) == torch.count_nonzero(weight)  # padded by zeros


@given(sizes, sizes, st.integers(0, 9))
def test_any_order_is_undone(rows: int, columns: int, seed: int) -> None:
    weight = matrix(rows, columns, seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    packed = pack(weight, order)
    assert torch.equal(unpack(packed), weight)
    assert torch.equal(packed.tiles, pack(weight[order]).tiles)
    assert torch.equal(unpack_rows(packed), weight[order])


@given(sizes, sizes, st.lists(st.integers(0, 149), max_size=20))
def test_rows_are_gathered_from_the_packed_matrix(rows: int, columns: int, wanted: list[int]) -> None:
    weight = matrix(rows, columns)
    indices = torch.tensor([index % rows for index in wanted], dtype=torch.long)
    assert torch.equal(gather_rows(pack(weight), indices), weight[indices])


@pytest.mark.parametrize(("row", "column"), [(0, 0), (7, 7), (8, 0), (15, 63), (16, 64), (37, 130), (46, 191)])
def test_a_lane_finds_eight_columns_of_a_row_side_by_side(row: int, column: int) -> None:
    """Of a tile: row half, column half, row in its half (a lane's group), quad (its place in it), eight columns."""
    weight = torch.arange(47 * 192, dtype=torch.float32).reshape(47, 192)
    tile, step = row // 16, column // 64
    inside_row, inside_column = row % 16, column % 64
    lane = (inside_row % 8) * 4 + inside_column % 32 // 8
    place = (inside_row // 8 * 2 + inside_column // 32) * 256 + lane * 8 + inside_column % 8
    assert pack(weight).tiles[tile, step, place] == weight[row, column]


@pytest.mark.parametrize("width", [8, 24, 96])
def test_gates_lie_beside_their_ups(width: int) -> None:
    order = gate_up_permutation(width)
    assert sorted(order.tolist()) == list(range(2 * width))
    for tile in order.reshape(-1, 16).tolist():
        assert tile[:8] == list(range(tile[0], tile[0] + 8))
        assert tile[8:] == [gate + width for gate in tile[:8]]
    with pytest.raises(ShapeError, match="multiple of 8, got 12"):
        gate_up_permutation(12)


@pytest.mark.parametrize(("rotated", "plain", "size"), [(1, 0, 16), (4, 2, 64), (0, 3, 32), (9, 1, 128)])
def test_dimensions_lie_beside_their_partners(rotated: int, plain: int, size: int) -> None:
    order = rope_permutation(rotated, plain, size)
    assert sorted(order.tolist()) == list(range((rotated + plain) * size))
    for number, tile in enumerate(order.reshape(-1, 16).tolist()):
        if number < rotated * size // 16:
            assert tile[8:] == [dimension + size // 2 for dimension in tile[:8]]
            assert tile[0] // size == tile[15] // size == number * 16 // size
        else:
            assert tile == list(range(number * 16, number * 16 + 16))
    with pytest.raises(ShapeError, match="multiple of 16, got 40"):
        rope_permutation(2, 1, 40)


def test_only_matrices_are_packed() -> None:
    for shape in ((3,), (2, 3, 4)):
        with pytest.raises(ShapeError, match="must be a matrix"):
            pack(torch.zeros(shape))
