"""Prompts' rows of FP8: what their products mean, that nothing depends on how a request runs, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_inventory import GPUS
from lowering_cases import check_savings, kinds_of
from prefill_cases import CODED_SIZES, coded_pair, fp8_target
from recording import tokens_of_six
from stages import later
from tiny_models import PairPaths, make_pair, make_target

from lowlat import Runtime, RuntimeConfig, SpeculativeConfig
from lowlat.checkpoint.quantising import Quantiser
from lowlat.cli.reports.models import model_report
from lowlat.engine.loading.geometry import make_geometry
from lowlat.errors import ConfigError
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.make import Rank, refuse_codes
from lowlat.executors.planned import planned_workspaces
from lowlat.graphs import Bucket
from lowlat.graphs.program import Stage
from lowlat.kernels.formats import FP8
from lowlat.kernels.gemm.prefill.plan import segments_of
from lowlat.kernels.reference.gemm.linear import linear
from lowlat.kernels.toolchain.kernel import H200
from lowlat.models.activations import code_activations
from lowlat.models.target import read_model_config, rounding
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill

OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
CODED: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16", "quantize": "fp8", "activations": "fp8"}
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
WAYS: dict[str, dict[str, Any]] = {
    "tree": {"num_speculative_tokens": 3, "tree": TREE},
    "adaptive": {"num_speculative_tokens": "auto"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


def test_rows_are_rounded_by_scales_of_their_own() -> None:
    """Against torch's own rounding of each row by itself; a row of zeros, and one that is not finite, alone."""
    x, bias = torch.randn(9, 256).bfloat16() * 4, torch.randn(40)
    x[2], x[5, 7], x[6] = 0, torch.nan, x[6] * 1000
    parts = FP8.quantise(torch.randn(40, 256))
    weight, out = FP8.dequantise(parts, torch.float32), torch.empty(9, 40)
    linear(x, weight, bias, out=out, row_block=9, activations="fp8")
    codes = parts["fp8"].view(torch.float8_e4m3fn).double()
    for row in (0, 1, 3, 4, 6, 7, 8):
        numbers = x[row].float()
        largest, peak = torch.tensor(448.0), numbers.abs().max()
        scale, rounded = peak / largest, (numbers * (largest / peak)).to(torch.float8_e4m3fn).double()
        want = (codes @ rounded) * parts["fp8_scales"].double().flatten() * scale.double()
        error = float((out[row].double() - bias.double() - want).norm() / want.norm())
        assert error < 1e-5, (row, error)
        assert float((weight.double() @ numbers.double() - want).norm() / want.norm()) > 1e-2
    assert out[5].isnan().all() and torch.equal(out[2], bias) and out[[0, 1, 3, 4, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("block", [8, 64])
def test_a_row_has_its_bits_in_any_company(block: int) -> None:
    x, weight = torch.randn(block, 128).bfloat16(), torch.randn(96, 128)
    first, second = torch.empty(block, 96), torch.empty(block, 96)
    linear(x, weight, out=first, row_block=block, activations="fp8")
    other = x.clone()
    other[1:] = other[1:].flip(0) * 300
    linear(other, weight, out=second, row_block=block, activations="fp8")
    assert torch.equal(first[0], second[0])


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> list[list[int]]:
    """The tokens of the target alone, one request at a time, without reuse, a chunk at a time."""
    with Runtime.load(pair.target, **{**CODED, "max_batch": 1}, prefix_reuse=False, max_prefill_chunks=1) as runtime:
        return tokens_of_six(runtime)


@pytest.mark.second
@pytest.mark.parametrize("way", ["tree", later("adaptive")])
def test_speculation_reuse_and_neighbours_change_nothing(way: str, pair: PairPaths, expected: list[list[int]]) -> None:
    config = SpeculativeConfig(model=pair.head, strict=True, **WAYS[way])
    with Runtime.load(pair.target, config, **CODED, kv_blocks=40) as runtime:
        assert tokens_of_six(runtime) == expected
        if way != "adaptive":
            assert tokens_of_six(runtime, lambda number: config.num_speculative_tokens * (number % 2)) == expected


def test_it_is_of_prompts_alone(pair: PairPaths) -> None:
    """No step has such an operation, and of a prompt's the layers' have it."""
    options = RuntimeConfig(**CODED)
    config = code_activations(rounding(read_model_config(pair.target), Quantiser("fp8", False), "a test"), "a test")
    topology = TreeTopology.chain(3)
    geometry = make_geometry(config, None, {0: TreeTopology.chain(0), 3: topology}, options, None)
    step = build_step(geometry, Bucket(2, 4, 3), topology)
    assert not any("activations" in op.params for op in step.ops)
    coded = [op for op in build_prefill(geometry).ops if op.params.get("activations") == "fp8"]
    assert tuple(sorted({op.weights["weight"] for op in coded})) == config.coded_rows
    assert len(config.coded_rows) == 4 * config.num_layers and "lm_head.weight" not in config.coded_rows


def test_prefill_codes_rows_and_multiplies_codes(tmp_path: Path) -> None:
    """A norm leaves codes; attention's rows, and a FFN's activation, are coded by a launch."""
    pair = coded_pair(tmp_path)
    program = build_prefill(pair.geometry)
    kinds = kinds_of(pair.lower_program(program), Stage.PREFILL)
    gemm, norm = "prefill_gemm_fp8_by_codes", "coded_add_norm"
    layer = ["rotate", "gather_kv", "prefill_flash", "code_rows", gemm, norm, gemm, "code_arranged", gemm, norm, gemm]
    assert any(kinds[at : at + len(layer)] == layer for at in range(len(kinds))), kinds
    alone = kinds_of(coded_pair(tmp_path / "alone", fuse=False).lower_program(program), Stage.PREFILL)
    assert alone.count("code_rows") == alone.count(gemm) == kinds.count(gemm) == 8
    assert ("prefill.codes", torch.uint8) in planned_workspaces((program,), pair.source, H200).sizes


def test_segments_of_codes_are_added_up_and_activated(tmp_path: Path) -> None:
    """Of codes K counts two columns as one, and is cut into other segments than that of bf16 rows."""
    made = (pair := coded_pair(tmp_path, hidden_size=1408)).lower_program(build_prefill(pair.geometry))
    names = [call.kernel.name for call in made.calls]
    height = 2 * CODED_SIZES["intermediate_size"]
    place = next(number for number, name in enumerate(names) if name.startswith(f"gated_wide_add_{height}x6_plain"))
    assert names[place - 1].startswith(f"prefill_gemm_fp8_by_codes_{height}x704_6x2_64x1")
    assert segments_of(height, 1408)[0] != segments_of(height, 704)[0] == 6
    check_savings(made)


def test_gpus_and_chunks_without_such_products_are_refused(tmp_path: Path) -> None:
    pair = coded_pair(tmp_path)
    for gpu, size in ((GPUS[8, 0], 64), (GPUS[9, 0], 32)):
        pair.geometry = replace(pair.geometry, prefill_chunk=size)
        with pytest.raises(ConfigError, match=r"activations 'fp8' needs .* of capability 9.0, chunks of a multiple"):
            pair.lower_program(build_prefill(pair.geometry), gpu)


@pytest.mark.parametrize(
    ("capability", "chunk", "wide", "message"),
    [
        ((8, 9), 64, True, "is for GPUs of capability 9.0, and cuda:0 has 8.9"),
        ((9, 0), 96, True, "a prefill_chunk that is a multiple of 64, got 96"),
        ((9, 0), 64, False, "multiple of 8 rows and 128 columns, and layers.0.qkv.weight is 256 x 64"),
    ],
)
def test_what_kernels_do_not_multiply_is_refused_before_weights_are_read(
    capability: tuple[int, int], chunk: int, wide: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sizes: dict[str, Any] = {} if wide else {"hidden_size": 64, "head_dim": 32}
    pair = coded_pair(tmp_path, **sizes)
    program = build_prefill(pair.geometry)
    choice = DeviceChoice(torch.device("cuda", 0), "graph", "a test")
    rank = Rank(pair.target.config, {}, {64: program})
    with pytest.raises(ConfigError, match=message):
        refuse_codes(choice, [rank], chunk)
    refuse_codes(replace(choice, executor="reference"), [rank], chunk)


def test_models_without_fp8_by_row_are_refused_by_name(pair: PairPaths, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"activations 'fp8' is for layers in FP8 .*, and its layers are in float32"):
        Runtime.load(pair.target, **OPTIONS, activations="fp8")
    make_target(tmp_path / "plain", "llama", num_hidden_layers=1, **CODED_SIZES)
    with pytest.raises(ConfigError, match="and its layers are in int4"):
        Runtime.load(tmp_path / "plain", **{**CODED, "quantize": "int4"})
    block = fp8_target(tmp_path, "fp8-block", hidden_size=256)
    with pytest.raises(ConfigError, match="and its layers are in fp8_block; leave activations out"):
        Runtime.load(block, **OPTIONS, activations="fp8")
    with pytest.raises(ConfigError, match="tp_invariant has the same bits"):
        RuntimeConfig(activations="fp8", tp_invariant=True)
    with pytest.raises(ConfigError, match="activations must be"):
        RuntimeConfig(activations="int8")


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-tensor"])
def test_inspect_says_what_is_coded(kind: str, tmp_path: Path) -> None:
    target = fp8_target(tmp_path, kind)
    options: dict[str, Any] = {"max_context": 64, "max_batch": 1, "dtype": "auto", "device": "cpu"}
    said = [
        model_report(target, None, {**options, "activations": kind}, buffers=False)["geometry"]["activations"]
        for kind in (None, "fp8")
    ]
    dtype = read_model_config(target).dtype
    assert said == [
        f"{dtype}; of prompts fp8 for 8 matrices, with activations 'fp8'",
        f"{dtype}; of prompts fp8, for 8 matrices",
    ]


def test_fusions_save_the_launches_that_they_say(tmp_path: Path) -> None:
    made = (pair := coded_pair(tmp_path)).lower_program(build_prefill(pair.geometry))
    found = check_savings(made)
    assert found >= {"norm+gated ffn by codes", "norm+prefill gemm"} and "norm+gated ffn" not in found
