"""Packed experts: back to the same numbers from any size, in any order, and codes that decode to themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.formats import BF16, MXFP4, WeightFormat
from lowlat.kernels.formats.mxfp4 import (
    MAGNITUDES,
    MAX_SCALE,
    SCALE_OFFSET,
    dequantise,
    make_decode,
    pack_codes,
    unpack_codes,
)
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.packing import (
    PackedExperts,
    allocate_experts,
    pack_expert_into,
    pack_experts,
    unpack_expert,
)


def random_blocks(*shape: int, low: int = 1, high: int = MAX_SCALE) -> dict[str, torch.Tensor]:
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return {"blocks": blocks, "scales": torch.randint(low, high + 1, shape, dtype=torch.uint8)}


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 7), st.booleans())
def test_unpacking_gives_mxfp4_back(experts: int, rows: int, width: int, ordered: bool) -> None:
    made = random_blocks(experts, rows, width)
    order = torch.randperm(rows) if ordered else None
    packed = pack_experts(made, order=order)
    assert (packed.num_experts, packed.rows, packed.columns) == (experts, rows, width * 32)
    assert packed.scales is not None
    tiles = (experts, -(-rows // 16), -(-width // 2))
    assert (tuple(packed.words.shape), tuple(packed.scales.shape)) == ((*tiles, 128), (*tiles, 32))
    assert packed.num_bytes == tiles[0] * tiles[1] * tiles[2] * 544
    for expert in range(experts):
        want = dequantise(made["blocks"][expert], made["scales"][expert], torch.bfloat16)
        got = unpack_expert(packed, expert)
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 150), st.booleans())
def test_unpacking_gives_bf16_back(experts: int, rows: int, columns: int, ordered: bool) -> None:
    weight = torch.randn(experts, rows, columns).bfloat16()
    packed = pack_experts({"weight": weight}, order=torch.randperm(rows) if ordered else None)
    assert packed.scales is None
    for expert in range(experts):
        assert torch.equal(unpack_expert(packed, expert), weight[expert])


def test_experts_are_packed_one_by_one_in_any_order_to_the_same() -> None:
    made, order = random_blocks(4, 48, 3), gate_up_permutation(24)
    whole = pack_experts(made, order=order)
    apart = allocate_experts(MXFP4, num_experts=4, rows=48, columns=96, order=order)
    assert apart.scales is not None and whole.scales is not None
    address = apart.words.data_ptr()
    for expert in (2, 0, 3, 1):
        pack_expert_into(apart, expert, blocks=made["blocks"][expert], scales=made["scales"][expert])
    assert apart.words.data_ptr() == address
    assert torch.equal(apart.words, whole.words) and torch.equal(apart.scales, whole.scales)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (7, 31), (8, 32), (15, 63), (16, 64), (37, 130), (46, 191)])
def test_a_lane_finds_its_codes(row: int, column: int) -> None:
    """Word 0 and 1 of a lane: its row, blocks 0 and 1 of the step; 2 and 3: the row 8 below. Eight columns a word."""
    blocks = torch.zeros(1, 47, 6, 16, dtype=torch.uint8)
    blocks[0, row, column // 32, column % 32 // 2] = 5 << 4 * (column % 2)
    scales = torch.full((1, 47, 6), 127, dtype=torch.uint8)
    scales[0, row, column // 32] = 99
    packed = pack_experts({"blocks": blocks, "scales": scales})
    (place,) = packed.words.nonzero().tolist()
    lane = row % 8 * 4 + column % 32 // 8
    word = row % 16 // 8 * 2 + column % 64 // 32
    assert place == [0, row // 16, column // 64, lane * 4 + word]
    half = int(packed.words[tuple(place)]) >> 16 * (column % 2) & 0xFFFF
    pair = unpack_codes(packed.words[tuple(place)])[column % 8 // 2]
    assert half and int(pair) == 5 << 4 * (column % 2)
    assert packed.scales is not None
    (at,) = (packed.scales == 99 + SCALE_OFFSET).nonzero().tolist()
    assert at == [0, row // 16, column // 64, row % 8 * 4 + word]


def decode(words: torch.Tensor) -> list[torch.Tensor]:
    """The kernel's own decoding, run by Python's integers, as pairs of bf16."""
    own = make_decode().py_func
    with np.errstate(over="ignore"):
        rows = [own(np.uint32(int(word) & 0xFFFFFFFF)) for word in words]
    return [torch.tensor([int(row[pair]) & 0xFFFFFFFF for row in rows]) for pair in range(4)]


def test_decoding_is_exact_for_all_codes_and_scales() -> None:
    """Every code in every place of a word, next to random others; times every scale that is taken."""
    magnitudes = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    codes = torch.randint(0, 16, (8, 16, 8))
    for place in range(8):
        codes[place, :, place] = torch.arange(16)
    codes = codes.reshape(-1, 8)
    words = pack_codes((codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8))
    assert torch.equal(unpack_codes(words), (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8))
    for pair, both in enumerate(decode(words)):
        for half in range(2):
            bits = (both >> 16 * half & 0xFFFF).to(torch.int32) << 16
            value = bits.view(torch.float32).double()
            want = magnitudes[codes[:, 2 * pair + half]].double()
            assert torch.equal(value * 2.0**126, want)
            assert torch.equal(torch.signbit(value), torch.signbit(want))
            for scale in range(1, MAX_SCALE + 1):  # the input times 2**63, the stored power of two
                power = torch.tensor((scale + SCALE_OFFSET) << 23, dtype=torch.int32).view(torch.float32)
                product = (value.float() * 2.0**63) * power
                assert torch.equal(product.double(), want * 2.0 ** (scale - 127))


def test_scales_out_of_range_are_refused_but_for_zeros() -> None:
    for scale in (0, 192, 252, 255):
        blocks = torch.full((1, 16, 1, 16), 0x80, dtype=torch.uint8)  # zeros, every other one negative
        scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
        got = unpack_expert(pack_experts({"blocks": blocks, "scales": scales}), 0)
        assert not got.any()
        blocks[0, 3, 0, 7] = 1
        with pytest.raises(ConfigError, match=f"expert 0: scale {scale} of an MXFP4 block; kernels take 1 to 191"):
            pack_experts({"blocks": blocks, "scales": scales})


def room(weight_format: WeightFormat = MXFP4, *, rows: int = 16, columns: int = 64) -> PackedExperts:
    return allocate_experts(weight_format, num_experts=2, rows=rows, columns=columns)


def test_what_does_not_fit_is_refused() -> None:
    fine = random_blocks(16, 2)
    with pytest.raises(ShapeError, match="multiple of 32"):
        room(columns=40)
    with pytest.raises(ShapeError, match="order"):
        allocate_experts(MXFP4, num_experts=1, rows=16, columns=64, order=torch.arange(8))
    with pytest.raises(ShapeError, match="expert 2 of 2"):
        pack_expert_into(room(), 2, **fine)
    with pytest.raises(ShapeError, match="blocks and scales alone"):
        pack_expert_into(room(), 0, weight=torch.zeros(16, 64))
    with pytest.raises(ShapeError, match="weight alone"):
        pack_expert_into(room(BF16), 0, **fine)
    with pytest.raises(ShapeError, match="blocks must have shape"):
        pack_expert_into(room(rows=32), 0, **fine)
    with pytest.raises(ShapeError, match="no format holds a matrix by blocks"):
        pack_experts({"blocks": fine["blocks"][None]})
    with pytest.raises(ShapeError, match=r"no format holds a matrix by weight \[1, 16, 64\], blocks"):
        pack_experts({"weight": torch.zeros(1, 16, 64), **fine})
