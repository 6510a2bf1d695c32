"""The parts that programs of bench/ share: bytes against committed rows, weights, steps and rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench

from bench.lib.bytes import step_bytes
from bench.lib.case import Case
from bench.lib.model import Model, bucket_of
from bench.lib.step import Step
from bench.lib.weights import RandomParts
from bench.parallel import ParallelCase
from lowlat.engine.memory.plan import memory_need, plan_rank
from lowlat.errors import ConfigError, ShapeError
from lowlat.executors.planned import planned_workspaces
from lowlat.graphs import Bucket
from lowlat.graphs.scratch import place_scratch
from lowlat.kernels.gemm.prefill.narrow_gemm import num_parts
from lowlat.kernels.gemm.prefill.plan import segments_of
from lowlat.kernels.toolchain.kernel import H200
from lowlat.lowering.memory import workspace_bytes
from lowlat.models.weight_plan import weight_plan
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill

CPU = torch.device("cpu")
clock, micro, run = bench("lib.clock"), bench("micro"), bench("lib.run")


def case_of(row: dict[str, Any]) -> Case:
    return Case(row["batch"], row["context"], row["num_speculative_tokens"])


def counted(model: Model, case: Case, experts: float | None = None, **options: Any) -> int:
    chain = TreeTopology.chain(case.num_speculative_tokens)
    program = build_step(model.shapes(case), bucket_of(case, chain), chain)
    plan = model.plan(drafts=case.num_speculative_tokens > 0)
    return step_bytes(program, plan, model.config, case, experts, **options).total


def rows_of(repository: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((repository / "bench" / "results" / name).read_text())
    return rows


def test_bytes_of_committed_rows_of_whole_models(repository: Path) -> None:
    for row in rows_of(repository, "h200/dense.json"):
        counts = {counted(Model("llama-8b"), case_of(row), matrices_only=only) for only in (True, False)}
        assert row["bytes"] in counts, row
    a_thousandth = 36 * 13_236_480 * 1e-3  # of an expert in each layer, to which rows are rounded
    for row in rows_of(repository, "h200/gpt_oss.json"):
        found = counted(Model(row["model"]), case_of(row), row["distinct_experts"])
        assert found == pytest.approx(row["bytes"], rel=0, abs=a_thousandth / 2), row


def test_bytes_of_committed_rows_of_formats(repository: Path) -> None:
    for row in rows_of(repository, "h200/weights.json"):
        weights = "bf16" if row["weights"] == "mxfp4" else row["weights"]
        model = Model(row["model"], weights, row["lm_head"], row["kv"], row["draft"])
        experts = model.config.experts
        chosen = None if experts is None else experts.num_experts_per_token
        only = not row["model"].startswith("qwen3")
        assert counted(model, case_of(row), chosen, matrices_only=only) == row["bytes"], row


@pytest.mark.parametrize("size", [4])
def test_bytes_of_committed_rows_of_several_gpus(repository: Path, size: int) -> None:
    known: dict[ParallelCase, int] = {}
    for row in rows_of(repository, f"h200x{size}/parallel.json"):
        if "prompts" in row:
            continue
        case, model = case_of(row), Model(row["model"])
        drafts_on = row.get("draft_tensor_parallel_size") or 1
        cut = ParallelCase(row["model"], row["tensor_parallel_size"], case, drafts_on)
        spec = model.config.experts
        experts = None if spec is None else spec.expected_distinct(case.batch * case.rows)
        assert experts == row["expected_experts"]
        if cut not in known:
            ranks, chain = cut.rank_shapes(cut.shapes()), TreeTopology.chain(case.num_speculative_tokens)
            program, plan = build_step(ranks[0], bucket_of(case, chain), chain), model.plan(drafts=chain.depth > 0)
            configs = [each.config for each in ranks]
            known[cut] = step_bytes(program, plan, model.config, case, experts, ranks=configs).total
        rounded = 0 if spec is None else 1e-5 * known[cut]  # vectors of gpt-oss that those rows left out
        assert known[cut] == pytest.approx(row["bytes_of_a_card"], rel=0, abs=rounded), row


def test_recurrent_states_are_read_and_written_once() -> None:
    model, case = Model("qwen3.5-27b"), Case(2, 8192, 0)
    config = model.config
    (spec,) = set(config.deltas.values())
    state = 2 * 2 * len(config.deltas) * 4 * spec.num_value_heads * spec.key_dim * spec.value_dim
    chain = TreeTopology.chain(0)
    program = build_step(model.shapes(case), bucket_of(case, chain), chain)
    found = step_bytes(program, model.plan(drafts=False), config, case)
    kept = 2 * 2 * 2 * case.context * config.attention.kv_size * len(config.attentions)
    weights = sum(part.num_bytes for name, part in model.plan(drafts=False).items() if name != "embed.weight")
    assert found.state == state > 0
    assert found.total == pytest.approx(weights + kept + found.state, rel=1e-3)


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4", "int4_32_zeros", "nvfp4"])
def test_weights_are_those_of_their_plan_each_time(weights: str) -> None:
    model = Model("tiny-experts" if weights == "bf16" else "tiny", weights, draft=weights)
    plan = model.plan(drafts=True)
    source = RandomParts(plan, model.config, CPU)
    streamed = {names[0]: tensor for names, tensor in source.stream()}
    assert list(streamed) == list(plan) == list(source)
    for name, part in plan.items():
        assert (streamed[name].shape, streamed[name].dtype) == (torch.Size(part.shape), part.dtype)
        assert torch.equal(streamed[name], source[name])
    assert streamed["draft_model.draft_to_target"].diff().min() > 0
    with pytest.raises(ConfigError, match="'int3' are no format"):
        Model("tiny", "int3").plan(drafts=False)


def test_the_groups_of_int4_are_those_that_all_layers_allow() -> None:
    part = Model("gpt-oss-20b", "int4").plan(drafts=False)["layers.0.qkv.int4_scales"]
    assert part.shape[1] == 2880 // 64


def test_percentiles_and_turns() -> None:
    assert clock.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert clock.percentile([float(k) for k in range(300)], 99) == 296.0
    with pytest.raises(ValueError, match="no values"):
        clock.percentile([], 50)
    order: list[str] = []
    entries = [
        clock.Timed(name, lambda name=name: order.append(name), lambda name=name: order.append(name.upper()))
        for name in "ab"
    ]
    clock.round_robin(entries, 5, 3, CPU)
    assert "".join(order) == "AaaaaaBbbbbbAaaaaBbbbb"  # a reset, two replays untimed, then at most three timed
    assert [len(entry.ms) for entry in entries] == [5, 5]


@pytest.mark.wide
def test_a_case_that_fails_and_one_without_time_have_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, Any]:
        raise ShapeError("no")

    written: list[int] = []
    works = [run.Work("a", {"case": "a"}, fail), run.Work("b", {"case": "b"}, lambda: {"ms_p50": 1.0})]
    rows = run.run_all(works, {"commit": "abc"}, lambda rows: written.append(len(rows)), [CPU])
    assert rows[0]["error"] == "ShapeError: no" and rows[1]["ms_p50"] == 1.0 and written == [1, 2]
    (late,) = run.run_all(works[1:], {}, lambda rows: None, [CPU], limit_s=-1.0)
    assert late["skipped"] == "-1 s were over" and "ms_p50" not in late


def test_rows_of_single_kernels() -> None:
    entry = micro.Entry("copy", lambda copy: [], copies=10, moved_bytes=4_000_000)
    row = micro.describe(entry, [0.02, 0.01, 0.03], 4e3)
    assert (row["us_p50"], row["us_p99"], row["gb_per_s"], row["share_of_wall"]) == (2.0, 3.0, 2000.0, 0.5)


def test_a_step_starts_again_in_the_middle_of_a_context() -> None:
    """Every row is dead or has finite logits, and lengths grow by a token a slot at least."""
    model, case = Model("tiny"), Case(2, 192, 3)
    shapes = model.shapes(case, simulated_acceptance=None)
    step = Step(shapes, case, RandomParts(model.plan(drafts=True), model.config, CPU), CPU)
    try:
        state, scratch = step.executor.state, step.executor.scratch(step.bucket)
        for _ in range(2):
            step.reset()
            assert state["lengths"].tolist() == [192, 192]
            for number in range(1, 4):
                step.replay()
                assert bool(((scratch["finite"] != 0) | (scratch["row_live"] == 0)).all())
                assert all(192 + number <= length <= 192 + 4 * number for length in state["lengths"].tolist())
    finally:
        step.close()


@pytest.mark.parametrize("chunk", [128, 2048])
def test_the_plan_counts_the_workspaces_of_a_chunk_s_experts_and_attention(chunk: int) -> None:
    """The plan counts experts' partial sums, logits and their parts, lists of pairs and tiles, keys and values; none
    for torch's operations."""
    model = Model("gpt-oss-120b")
    config, spec = model.config, model.config.experts
    assert spec is not None
    hidden, inner, mixer = config.hidden_size, spec.inner_size, config.attention
    plan = weight_plan(config)
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.items()}
    shapes = replace(model.shapes(Case(1, 4096, 0)), prefill_chunk=chunk)
    prefill, step = build_prefill(shapes), build_step(shapes, Bucket(1, 1, 0), TreeTopology.chain(0))
    pairs, tiles = 4 * chunk, 4 * chunk // 16 + 128  # of the least pairs that a plan may have
    keys = -(-(shapes.max_context - 1 + chunk) // 128) * 128 * mixer.kv_size * 2  # whole tiles
    apart = min(chunk, 1024)  # rows whose segments may be apart, of this program or of a smaller one
    sums = max(count * apart * n if (count := segments_of(n, k)[0]) > 1 else 0 for n, k in ((5120, 2880), (2880, 4096)))
    by_place = pairs + 8 * spec.num_experts if pairs >= 48 * spec.num_experts else 0  # rows of the warpgroups' GEMMs
    arranged = (4 * pairs, 2 * by_place * inner) if by_place else ()
    logits = 4 * chunk * spec.num_experts
    experts = (4 * pairs, 16 * tiles, 4 * (by_place or pairs) * hidden, logits, num_parts(hidden) * logits)
    parts = (*experts, *arranged, keys, keys, 16, 2 * chunk * 4096, 4 * sums)
    need, planned = plan_rank((prefill,), weights, CPU, H200)
    assert planned is not None
    scratch = place_scratch(prefill, planned.unused_by(prefill)).num_bytes
    assert need.scratch_bytes == scratch + sum(parts)
    alone, of_step = (planned_workspaces((each,), weights, H200).sizes for each in (prefill, step))
    assert [name for name, _ in alone.keys() & of_step] == ["experts.partials"]  # a step's are smaller
    added = workspace_bytes({key: count for key, count in of_step.items() if key not in alone})
    both, _ = plan_rank((step, prefill), weights, CPU, H200)
    assert both.scratch_bytes == need.scratch_bytes + added
    assert memory_need((prefill,), weights, CPU).scratch_bytes == place_scratch(prefill).num_bytes
