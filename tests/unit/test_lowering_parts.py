"""Lowering under tp_invariant: no order of sums depends on how many ranks there are, and what is refused."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_inventory import GPUS
from lowered import Pair
from stages import later
from tiny_models import make_target, mxfp4_target

from lowlat.errors import ConfigError
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.make import check_positions, refuse_parts, refuse_ranks
from lowlat.executors.planned import planned_workspaces
from lowlat.kernels.attention.limits import most_positions
from lowlat.kernels.toolchain.kernel import H200, Kernel
from lowlat.lowering.memory import workspace_bytes
from lowlat.models.rank_weights import rank_weights
from lowlat.models.shard import rank_configs
from lowlat.models.target import read_model_config
from lowlat.options.runtime import RuntimeConfig
from lowlat.step.prefill import build_prefill
from lowlat.tools.precompile import kernels_of

SIZES: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256, "num_hidden_layers": 1,
    "intermediate_size": 832,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "max_batch": 2, "max_context": 256, "block_size": 16, "prefill_chunk": 64, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A dense target, and MoE layers in bf16 and MXFP4; 13 steps of the inner width, so parts are uneven."""
    folder = tmp_path_factory.mktemp("parts")
    make_target(folder / "llama", "llama", vocab_size=512, **SIZES)
    make_target(folder / "qwen3_moe", "qwen3_moe", vocab_size=512, **SIZES)
    mxfp4_target(folder / "mxfp4", vocab_size=512, **SIZES)
    make_target(folder / "narrow", "llama", vocab_size=512, **{**SIZES, "intermediate_size": 96})
    return {path.name: path for path in folder.iterdir()}


def kernels(target: Path, size: int, gpu: Any = H200, **options: Any) -> Mapping[str, Kernel]:
    """All kernels of a runtime."""
    given = {**OPTIONS, "tp_invariant": True, "tensor_parallel_size": size, **options}
    return kernels_of(target, None, RuntimeConfig(**given), gpu)


@pytest.mark.second
@pytest.mark.parametrize("name", ["qwen3_moe", later("llama"), later("mxfp4")])
def test_sums_are_cut_the_same_by_any_number_of_ranks(name: str, targets: Mapping[str, Path]) -> None:
    """Where K is cut for ranks there are 8 / N parts, of a unit that all ranks have; elsewhere K is summed at once in
    prefill, whatever width a rank has; attention has the same splits."""
    for size in (1, 2, 4, 8) if name == "qwen3_moe" else (1, 8):
        names, count = list(kernels(targets[name], size)), 8 // size
        parts = {int(found[1]) for each in names for found in [re.search(r"parts(\d)x1", each)] if found}
        assert count in parts and parts <= {count}
        decode = [each for each in names if each.startswith(("decode_gemm_add", "decode_gemm_all_reduce"))]
        assert decode and all(f"parts{count}x1" in each for each in decode)
        assert all("all_reduce" in each for each in decode) == (size > 1)
        whole = [re.search(r"_(\d+)x(\d+)_(\d)x(\d+)_(parts)?", each) for each in names if "prefill_gemm" in each]
        assert whole and all(found is not None and (found[3] == "1") == (found[5] is None) for found in whole)
        splits = {found[1] for each in names if (found := re.search(r"attention_64.*x(128|256|512)\D", each))}
        assert splits == {"128"}
        assert not any(each.startswith(("experts_mlp", "experts_warpgroups")) for each in names)
        if name != "llama":
            assert any(each.startswith("experts_gemm_down") and f"parts{count}x1" in each for each in names)
            assert any(re.match(r"experts_grouped_down_256x\d+x\d_\w+_of", each) for each in names)


def test_a_fusion_that_sums_k_at_once_lets_parts_be(targets: Mapping[str, Path]) -> None:
    """The residual sum stays an epilogue, an MoE layer is no one launch, and unfused launches sum in the same parts."""
    for name in ("llama", "mxfp4"):
        pair = Pair(targets[name])
        (config,) = rank_configs(pair.target.config, 1, invariant=True)
        pair.target = replace(pair.target, config=config)
        groups = pair.lower(0, 2).groups
        fusions = [group.name for group in groups]
        assert ("gemm+add" in fusions) and "moe" not in fusions
        assert ("norm+router" in fusions) == (name == "mxfp4")
        alone = Pair(targets[name], fuse=False)
        alone.target = pair.target
        for lowered in (groups, alone.lower(0, 2).groups):
            summing = [group for group in lowered if any("num_parts" in op.params for op in group.ops)]
            assert len(summing) == 2
            assert all(any("parts8x1" in call.kernel.name for call in group.kernel_calls) for group in summing)


@pytest.mark.parametrize("name", ["llama", "mxfp4"])
def test_workspaces_of_parts_are_planned(name: str, targets: Mapping[str, Path]) -> None:
    """Prefill asks for the workspaces that were counted: they may not grow after a capture."""
    pair = Pair(targets[name])
    (config,) = rank_configs(pair.target.config, 1, invariant=True)
    pair.target = replace(pair.target, config=config)
    program = build_prefill(replace(pair.geometry, prefill_chunk=64))
    weights = rank_weights(pair.source, config)
    planned = workspace_bytes(planned_workspaces([program], weights, H200).sizes)
    assert pair.lower_program(program).workspace.num_bytes == planned


def test_what_kernels_do_not_sum_in_parts_is_refused_by_name(targets: Mapping[str, Path]) -> None:
    """Widths without whole steps; GPUs whose prefill is a matrix library's, and chunks that only that takes."""
    graph = DeviceChoice(torch.device("cuda", 0), "graph", "asked for")
    refuse_ranks(RuntimeConfig(tp_invariant=True, tensor_parallel_size=2), graph)
    narrow, wide = (read_model_config(targets[name]) for name in ("narrow", "llama"))
    refuse_parts(graph, rank_configs(wide, 2, invariant=True)[0], None)
    refuse_parts(graph, rank_configs(narrow, 2)[0])
    refuse_parts(replace(graph, executor="reference"), rank_configs(narrow, 2, invariant=True)[0])
    with pytest.raises(ConfigError, match=r"whole steps of 64 columns .* target's intermediate_size 96 .*'reference'"):
        refuse_parts(graph, rank_configs(narrow, 2, invariant=True)[0])
    with pytest.raises(ConfigError, match=r"tp_invariant cannot sum layers.0.down.weight by kernels: parts of K are"):
        kernels(targets["narrow"], 1)
    with pytest.raises(ConfigError, match=r"tp_invariant needs prefill's own GEMMs, of GPUs of capability 9.0"):
        kernels(targets["llama"], 2, GPUS[(8, 0)])
    with pytest.raises(ConfigError, match=r"prefill_chunk 32"):
        kernels(targets["llama"], 1, prefill_chunk=32)


def test_contexts_are_those_of_the_splits_that_all_ranks_have(targets: Mapping[str, Path]) -> None:
    """However many heads a rank has."""
    pair = Pair(targets["llama"])
    most = most_positions(8, 1 << 20, 8)
    longer = replace(pair.geometry, max_context=most + 512)
    with pytest.raises(ConfigError, match="max_context"):
        check_positions(longer, invariant=True)
    check_positions(pair.geometry, invariant=True)
