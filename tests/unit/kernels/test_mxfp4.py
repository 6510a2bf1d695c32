"""MXFP4 against its definition, code by code, and against transformers' unpacking."""

import math

import pytest
import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.formats.mxfp4 import dequantise, quantise

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
CODES = [*VALUES, *(-value for value in VALUES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_at_every_scale_is_exact(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(32) % 16
    packed = (codes[0::2] | (codes[1::2] << 4)).to(torch.uint8)
    blocks = packed.repeat(256, 1, 1).to(device)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].to(device)
    got = dequantise(blocks, scales, dtype).cpu()
    assert got.shape == (256, 32)
    assert got.dtype == dtype
    for scale in range(253):
        expected = [CODES[code] * 2.0 ** (scale - 127) for code in codes.tolist()]
        assert got[scale].double().tolist() == expected
        signs = torch.tensor([math.copysign(1.0, value) for value in expected])
        assert torch.equal(torch.where(torch.signbit(got[scale]), -1.0, 1.0), signs)
    assert got[254, 2] == 2.0**127
    assert bool(got[255].isnan().all())


def test_the_low_nibble_comes_first_and_leading_shapes_are_kept() -> None:
    blocks = torch.zeros(2, 3, 4, 16, dtype=torch.uint8)
    blocks[1, 2, 3, 5] = 0x2F  # low F: -6, high 2: 1
    got = dequantise(blocks, torch.full((2, 3, 4), 128, dtype=torch.uint8), torch.float32)
    assert got.shape == (2, 3, 128)
    assert got[1, 2, 96 + 10] == -12.0
    assert got[1, 2, 96 + 11] == 2.0
    assert int((got != 0).sum()) == 2


def test_it_unpacks_as_transformers_does() -> None:
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8)
    theirs = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(dequantise(blocks, scales, torch.bfloat16), theirs.transpose(1, 2))


def test_what_was_expanded_is_kept_exactly() -> None:
    blocks = torch.randint(0, 256, (50, 4, 16), dtype=torch.uint8)
    scales = torch.randint(3, 253, (50, 4), dtype=torch.uint8)
    values = dequantise(blocks, scales, torch.float32)
    assert torch.equal(dequantise(*quantise(values), torch.float32), values)
    zeros = torch.zeros(2, 64)
    assert torch.equal(dequantise(*quantise(zeros), torch.float32), zeros)


@pytest.mark.parametrize("scale", [1e-38, 1e-3, 1.0, 1e30])
def test_quantising_takes_the_nearest_code(scale: float) -> None:
    weight = torch.randn(40, 96) * scale
    blocks, scales = quantise(weight)
    assert blocks.shape == (40, 3, 16)
    assert scales.shape == (40, 3)
    got = dequantise(blocks, scales, torch.float32).double().reshape(40, 3, 32)
    step = torch.exp2(scales.double() - 127)[..., None]
    grid = torch.tensor(CODES, dtype=torch.float64) * step[..., None]
    exact = weight.double().reshape(40, 3, 32)
    nearest = (grid - exact[..., None]).abs().amin(-1)
    assert torch.equal((got - exact).abs(), nearest)
    largest = exact.abs().amax(-1)
    assert bool((largest / step[..., 0] <= 7).all())
    assert bool(((largest / step[..., 0] >= 3.5) | (scales == 0)).all())


def test_ties_go_to_the_even_code_and_input_is_checked() -> None:
    row = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, -5.0] + [0.0] * 21)
    got = dequantise(*quantise(row), torch.float32)
    assert got[:11].tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -2.0, -4.0]
    with pytest.raises(ShapeError, match="multiple of 32"):
        quantise(torch.zeros(3, 40))
    with pytest.raises(ConfigError, match="finite"):
        quantise(torch.full((32,), float("nan")))
    with pytest.raises(ShapeError, match="blocks"):
        dequantise(torch.zeros(3, 2, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), torch.float32)
