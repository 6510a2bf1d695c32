"""Weight formats: both sides know the same ones, and what is counted is what is held."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_walk import Walker, walkable
from quantised_layers import random_parts as random_matrix

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats import STORED_FORMATS, Matrices, check_widths, part_groups, read_format
from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.formats import (
    BF16,
    DENSE_FORMATS,
    FORMATS,
    MATRIX_FORMATS,
    MXFP4,
    format_of,
    matrix_format,
    numbers_an_entry,
)
from lowlat.kernels.formats.dense import pack_matrix, unpack_matrix
from lowlat.kernels.gemm.unpacking import unpacked_shape
from lowlat.kernels.moe.packing import bytes_an_expert, pack_experts, unpack_expert
from lowlat.models.families import FAMILIES


def random_parts(name: str, count: int, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Parts of E random matrices."""
    parts = {}
    for part, (shape, dtype) in FORMATS[name].specs(rows, columns, torch.bfloat16).items():
        if dtype.is_floating_point:
            parts[part] = torch.randn(count, *shape).to(dtype)
        else:
            parts[part] = torch.randint(100, 120, (count, *shape), dtype=dtype)
    return parts


def test_both_sides_know_the_same_formats() -> None:
    assert set(FORMATS) == set(STORED_FORMATS) == {"bf16", "mxfp4"}
    assert set(MATRIX_FORMATS) == {*FORMATS, *DENSE_FORMATS}
    parts = [part for each in FORMATS.values() for part in each.parts]
    assert len(parts) == len(set(parts)), "a part tells its format"
    for name, each in FORMATS.items():
        assert STORED_FORMATS[name].packed is each is format_of(each.parts)
    assert [numbers_an_entry(part) for part in ("weight", "blocks", "scales", "bias")] == [1, 2, 0, None]
    with pytest.raises(ShapeError, match="held by weight, or blocks and scales; got blocks"):
        format_of({"blocks": 0})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (40, 96), (5, 32)])
def test_what_is_counted_is_what_is_held(name: str, rows: int, columns: int) -> None:
    held, parts = FORMATS[name], random_parts(name, 3, rows, columns)
    assert held.shape(parts) == (3, rows, columns)
    assert 3 * held.num_bytes(rows, columns) == sum(part.nbytes for part in parts.values())
    numbers = sum((numbers_an_entry(part) or 0) * tensor.numel() for part, tensor in parts.items())
    assert numbers == 3 * rows * columns
    packed = pack_experts(parts)
    tensors = [each for each in (packed.words, packed.scales) if each is not None]
    assert packed.num_bytes == 3 * held.packed_bytes(rows, columns) == sum(each.nbytes for each in tensors)
    assert bytes_an_expert((7, torch.zeros(3, rows), *tensors)) == held.packed_bytes(rows, columns)
    assert held.packed_bytes(rows, columns) >= held.num_bytes(rows, columns)
    assert packed.format is held and held.has_scales == (packed.scales is not None)


@pytest.mark.parametrize("name", FORMATS)
def test_packing_and_dequantising_mean_the_same_numbers(name: str) -> None:
    parts = random_parts(name, 2, 24, 64)
    packed, plain = pack_experts(parts, order=torch.randperm(24)), FORMATS[name].dequantise(parts, torch.bfloat16)
    for expert in range(2):
        assert torch.equal(unpack_expert(packed, expert), plain[expert])
    exact = FORMATS[name].dequantise(parts, torch.float32)
    assert exact.dtype == torch.float32 and torch.equal(exact, plain.float())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("transposed", [True, False])
def test_stored_tensors_make_the_parts(name: str, transposed: bool) -> None:
    matrices = Matrices("layers.0.experts.gate_up", "stored.gate_up", (4, 32, 64), True, transposed)
    recipes = STORED_FORMATS[name].recipes(matrices, torch.float32)
    specs = FORMATS[name].specs(32, 64, torch.float32)
    made = {recipe.weight.rpartition(".")[2]: (recipe.shape, recipe.dtype) for recipe in recipes}
    assert made == {part: ((4, *shape), dtype) for part, (shape, dtype) in specs.items()}
    (group,) = part_groups(recipes, {})
    assert group.recipes == tuple(recipes)


def test_quantization_config_names_the_format_or_is_refused() -> None:
    assert read_format(Fields({}, "config.json")).packed is BF16
    named = Fields({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}, "config.json")
    assert read_format(named, ("mxfp4",)).packed is MXFP4
    with pytest.raises(ConfigError, match="quant_method 'mxfp4' is not implemented for this family; implemented: none"):
        read_format(named)
    check_widths(named, STORED_FORMATS["mxfp4"], {"hidden_size": 64})
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size must be a multiple of 32 for MXFP4, found 40"):
        check_widths(named, STORED_FORMATS["mxfp4"], {"hidden_size": 40})


def test_the_readme_of_models_names_every_family(repository: Path) -> None:
    text = (repository / "lowlat" / "models" / "README.md").read_text()
    assert all(f"`{name}`" in text for name in FAMILIES)


@pytest.mark.parametrize("name", DENSE_FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(40, 256)])
@pytest.mark.parametrize("wide", [False, True])
def test_dense_matrices_come_out_of_their_tiles(name: str, rows: int, columns: int, wide: bool) -> None:
    """Random codes, in the order that was asked for, by the kernel, too; bytes are those that plans count."""
    held, parts = DENSE_FORMATS[name], random_matrix(name, rows, columns, wide=wide)
    order = torch.randperm(rows)
    packed = pack_matrix(held, parts, order)
    found, expected = unpack_matrix(packed).float(), held.dequantise(parts, torch.float32)[order]
    if packed.scales is None:
        assert torch.equal(found, expected.bfloat16().float())
    else:
        assert torch.equal(found * packed.scales[:rows, None], expected)
    made, walker = torch.full(unpacked_shape(rows, columns), torch.nan).bfloat16(), Walker()
    with walkable(walker, "formats.fragment", "gemm.prefill.weight_steps", "gemm.unpacking") as modules:
        walker.run(*modules[-1].unpack_weight(weight=packed, out=made))
    assert torch.equal(made[:rows].float(), found) and not made[rows:].any()
    assert packed.num_bytes == packed.memory.nbytes == held.packed_bytes(rows, columns, wide=wide)
    assert (packed.rows, packed.columns) == held.shape(parts) and matrix_format(parts) is held


@pytest.mark.parametrize("name", DENSE_FORMATS)
def test_unpacking_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It brings nothing from the host to the device, which no capture may."""
    held, convert = DENSE_FORMATS[name], torch.Tensor.to
    specs = held.specs(32, 128, torch.bfloat16).items()
    packed = pack_matrix(held, {part: torch.ones(shape).to(dtype) for part, (shape, dtype) in specs})

    def to(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        assert not named and all(isinstance(each, torch.dtype) for each in arguments)
        return convert(tensor, *arguments)

    monkeypatch.setattr(torch.Tensor, "to", to)
    assert unpack_matrix(packed).shape == (32, 128)
