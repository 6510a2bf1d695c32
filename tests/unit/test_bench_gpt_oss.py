"""The gpt-oss benchmark without a GPU: bytes and floors, rows and report, weights, the checks of a soak."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from benches import bench

from bench.dense_cases import TINY, Case
from bench.dense_cases import make_weights as dense_weights
from bench.gpt_oss_cases import (
    MODELS,
    SMALL_CASES,
    OssCase,
    draft_config,
    expert_bytes,
    model_config,
    step_bytes,
)
from bench.gpt_oss_step import shapes_of
from bench.lowlat_step import GraphStep, step_geometry
from bench.soak import check_state
from bench.wall import Wall
from lowlat.engine.memory.plan import memory_need
from lowlat.graphs import Bucket, Role
from lowlat.graphs.program import Stage
from lowlat.kernels.gemm.prefill.plan import segments_of
from lowlat.kernels.reference.step import checks
from lowlat.models.weight_plan import weight_plan
from lowlat.speculators.eagle3.weights import draft_weight_plan
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.checks import CheckedKinds
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill
from lowlat.tools.profile.report import Summary, summarise
from lowlat.tools.profile.times import CallSite, KernelEvent, attribute

CPU = torch.device("cpu")
gpt_oss = bench("gpt_oss")


def test_bytes_are_those_of_the_parts() -> None:
    """Against the sums of the canonical weights themselves, of every kind once."""
    for name, model in MODELS.items():
        plan = weight_plan(model_config(model, 4096))
        sizes = {weight: torch.empty(shape, dtype=dtype, device="meta") for weight, (shape, dtype) in plan.items()}
        bytes_of = {weight: tensor.numel() * tensor.element_size() for weight, tensor in sizes.items()}
        experts = sum(size for weight, size in bytes_of.items() if weight.endswith(("blocks", "scales")))
        assert experts == model.num_layers * model.num_experts * expert_bytes(model)
        matrices = sum(
            size for weight, size in bytes_of.items() if sizes[weight].dim() == 2 and weight.endswith("weight")
        )
        matrices -= bytes_of["embed.weight"]
        base = OssCase(name, Case(1, 4096, 0))
        kv = 2 * model.num_kv_heads * model.head_dim * 2 * (model.num_layers // 2) * (4096 + 128)
        assert step_bytes(model, base, 0) == matrices + kv
        assert step_bytes(model, base, model.num_experts) == matrices + kv + experts
        head = draft_weight_plan(draft_config(model, 32000, 4096))
        reads = {"head.fc.weight": 1}
        drafted = sum(
            reads.get(weight, 3) * 2 * shape[0] * shape[1] for weight, (shape, _) in head.items() if len(shape) == 2
        )
        drafted += 3 * 4096 * 2 * model.num_kv_heads * model.head_dim * 2
        speculating = replace(base, step=Case(1, 4096, 3))
        assert step_bytes(model, speculating, 0) == matrices + kv + drafted


class StandIn:
    """In place of the step: the benchmark's own flow, with made-up kernels."""

    def __init__(self, model: Any, case: Any, *_: Any) -> None:
        if case.step.context == 320:
            raise ValueError("this case fails")
        self.model, self.case = model, case
        self.name, self.num_launches, self.closed = "stand-in", 2, False

    def replay(self) -> None:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))

    def reset(self) -> None:
        assert not self.closed

    def distinct_experts(self) -> list[int]:
        return [2, 3, 4, 3]

    def sites(self) -> list[CallSite]:
        return [CallSite(Stage.VERIFY, name) for name in ("experts_mlp_x", "router_x")]

    def profile(self, num_steps: int, wall: float, sites: list[CallSite]) -> Summary:
        assert sites[0].moved_bytes > 0 and sites[1].moved_bytes == 0, "the experts chosen are counted"
        events = [KernelEvent("", 10.0 * k, 10.0 * k + 8) for k in range(2 * num_steps)]
        return summarise(attribute(events, sites), wall)

    def close(self) -> None:
        self.closed = True


@pytest.mark.second
def test_the_flow_from_cases_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpt_oss, "make_step", StandIn)
    monkeypatch.setattr(gpt_oss, "measure_wall", lambda *_: Wall(100.0, 0, 0, {}))
    out = tmp_path / "results" / "oss.json"
    arguments = ["--out", str(out), "--small", "--device", "cpu", "--replays", "4", "--turn", "2", "--profile"]
    assert gpt_oss.main([*arguments, "--no-plot"]) == 1
    rows = json.loads(out.read_text())
    assert "this case fails" in rows[0]["error"]
    for row in rows[1:]:
        assert row["distinct_experts"] == fmean([2, 3, 4, 3])
        assert row["floor_ms"] == pytest.approx(row["bytes"] / 1e8, rel=1e-3, abs=1e-4)
        assert row["launches"] == 2
        assert row["idle_share"] == pytest.approx(0.2, abs=0.01)
        assert row["tokens_per_s_is_simulated"]
        ratio = row["tokens_per_s"]["3.0"] / row["tokens_per_s"]["2.3"]
        assert ratio == pytest.approx(3 / 2.3, rel=1e-2)
        assert row["bound_speedup"] is None  # S = 0 failed
    text = out.with_suffix(".md").read_text()
    assert "small, 2 x 192, S=3, experts alike" in text and "(sim.)" in text
    assert "experts_mlp_x" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpt_oss.main(["--out", str(out), "--small", "--case", "unknown"])


@pytest.mark.parametrize("chunk", [128, 2048])
def test_the_plan_counts_the_workspaces_of_a_chunk_s_experts_and_attention(chunk: int) -> None:
    """What experts add to each row, logits, lists of pairs and tiles, keys and values; nothing where torch's operations
    run."""
    model = MODELS["120b"]
    plan = weight_plan(model_config(model, 4096))
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.items()}
    shapes = shapes_of(model, OssCase("120b", Case(1, 4096, 0)), TreeTopology.chain(0))
    shapes = replace(shapes, prefill_chunk=chunk)
    prefill, step = build_prefill(shapes), build_step(shapes, Bucket(1, 1, 0), TreeTopology.chain(0))
    scratch = sum(spec.num_bytes for spec in prefill.specs(Role.SCRATCH))
    pairs, tiles = 4 * chunk, 4 * chunk // 16 + 128  # of the least pairs that a plan may have
    keys = -(-(shapes.max_context - 1 + chunk) // 128) * 128 * model.num_kv_heads * model.head_dim * 2  # whole tiles
    apart = min(chunk, 1024)  # rows whose segments may be apart, of this program or of a smaller one
    sums = max(count * apart * n if (count := segments_of(n, k)[0]) > 1 else 0 for n, k in ((5120, 2880), (2880, 4096)))
    by_place = pairs + 8 * model.num_experts if pairs >= 48 * model.num_experts else 0  # rows of the warpgroups' GEMMs
    arranged = (4 * pairs, 2 * by_place * model.intermediate_size) if by_place else ()
    experts = (4 * pairs, 16 * tiles, 4 * (by_place or pairs) * model.hidden_size, 4 * chunk * model.num_experts)
    parts = (*experts, *arranged, keys, keys, 16, 2 * chunk * 4096, 4 * sums)
    need = memory_need((step, prefill), weights, CPU, has_kernels=True)
    assert need.scratch_bytes == scratch + sum(parts)
    assert memory_need((prefill,), weights, CPU).scratch_bytes == scratch


def test_a_soak_sees_what_is_wrong() -> None:
    case = SMALL_CASES[1].step
    state = {
        "lengths": torch.tensor([192 + 10, 192 + 40]),
        "active": torch.tensor([1, 1]),
        "num_drafts": torch.tensor([3, 0]),
    }
    fine = torch.ones(2, 4, dtype=torch.uint8)
    assert check_state(state, fine, case, 10) == []
    assert "slot 0 has 202 tokens 11 steps" in check_state(state, fine, case, 11)[0]
    assert "slot 1 has 232 tokens 9 steps" in check_state(state, fine, case, 9)[0]
    assert "not finite" in check_state(state, fine * 0, case, 10)[0]
    state["active"][1] = 0
    state["num_drafts"][0] = 4
    assert len(check_state(state, fine, case, 10)) == 2
    state["ring_checks"] = torch.zeros(64, 3, checks.WIDTH, dtype=torch.int64)
    state["ring_checks"][7, 1, :4] = torch.tensor([checks.MASK_DEAD, 3, 9, 0])
    assert check_state(state, fine, case, 10)[2] == "a check failed within 10 steps: dead row 3 has mask 0x9"


def test_a_checked_step_is_put_into_the_middle_of_a_context() -> None:
    """Nothing fails of a step whose slots did not join, nor when it begins again."""
    case = Case(2, 192, 3)
    every = CheckedKinds(masks=True, spans=True, lengths=True, falls_back=False)
    shapes = replace(step_geometry(TINY, case, TreeTopology.chain(3)), checks=every, simulated_acceptance=None)
    step = GraphStep(TINY, case, dense_weights(TINY, CPU), CPU, shapes=shapes)
    try:
        for _ in range(2):
            step.reset()
            for number in range(1, 4):
                step.replay()
                ((state, sound),) = step.looks()
                assert check_state(state, sound, case, number) == []
        state["tree_masks"][0, 1] = 1
        step.replay()
        problems = check_state(*step.looks()[0], case, 3)
        assert any("row 1 has mask 0x1, which lacks its own bit 0x2" in each for each in problems)
    finally:
        step.close()


class SoakedStep:
    """In place of the step: a token a replay, the same in every pass but for the one that `strange` names."""

    strange = 0

    def __init__(self, model: Any, case: Any, *_: Any, **__: Any) -> None:
        self.case, self.passes = case.step, 0
        self.state = {
            "tokens": torch.zeros(1, self.case.context + 2048, dtype=torch.int32),
            "lengths": torch.tensor([0]), "active": torch.tensor([1]), "num_drafts": torch.tensor([1]),
        }  # fmt: skip

    def looks(self) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return [(self.state, torch.ones(4, dtype=torch.bool))]

    def reset(self) -> None:
        self.passes += 1
        self.state["lengths"].fill_(self.case.context)

    def replay(self) -> None:
        length = int(self.state["lengths"])
        self.state["tokens"][0, length] = length * 7 + (self.passes == self.strange)
        self.state["lengths"] += 1

    def close(self) -> None:
        self.case = None


@pytest.mark.parametrize("strange", [0, 2])
def test_a_soak_s_rows_are_written_after_each_pass(
    strange: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpt_oss, "OssStep", SoakedStep)
    monkeypatch.setattr(SoakedStep, "strange", strange)
    out = tmp_path / "results" / "soak.json"
    arguments = ["--small", "--device", "cpu", "--soak", "600", "--context", "192", "320", "--out", str(out)]
    assert gpt_oss.main([*arguments, "--commit", "abc"]) == int(strange > 0)
    rows = json.loads(out.read_text())
    names = [f"small, 1 x {context}, S=3, draft vocabulary 512" for context in (192, 320)]
    assert [row["case"] for row in rows] == names
    for row in rows:
        assert (row["steps"], row["asked_steps"], row["passes"], row["commit"]) == (600, 600, 3, "abc")
        assert row["tokens_a_step"] == 1.0 and row["weights_in_s"] >= 0 and row["run_in_s"] >= 0
        wanted = ["pass 2 gave other tokens than the passes before"] if strange else []
        assert row["problems"] == wanted
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["steps"] for line in lines] == [254, 508, 600] * 2
