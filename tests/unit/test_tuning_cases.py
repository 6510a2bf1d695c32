"""Cases in which attention and MoE layers are timed: what their arguments hold; and the tiles that the command
lists.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import answer, lowlat, refusal
from kernel_inventory import GPUS
from moe_cases import make_moe

import lowlat as package
from lowlat.kernels.attention.launch_plan import AttentionPlan
from lowlat.kernels.formats import BF16, MXFP4
from lowlat.kernels.moe.decode.mlp_plan import choose_mlp_plan, mlp_plans, plan_mlp
from lowlat.kernels.moe.plan import (
    DOWN,
    GATE_UP,
    ExpertShape,
    choose_expert_plan,
    expert_plans,
    next_power,
    plan_experts,
)
from lowlat.kernels.moe.prefill.experts import prefill_experts
from lowlat.kernels.moe.prefill.plan import choose_moe_plan, moe_plans
from lowlat.kernels.toolchain.kernel import H200, Gpu, KernelCall
from lowlat.kernels.tuning.table import Entry, TuningTable
from lowlat.tools.tune.arguments import Places
from lowlat.tools.tune.cases import Calls, cases_of
from lowlat.tools.tune.pairs import PairPrograms, Sizes, open_pair, random_pair
from lowlat.tools.tune.run import counted, kinds_of, listed
from lowlat.tools.tune.shapes import Shape, calls_by_plan, collect

DEMO = Path(package.__file__).parent / "demo"
CPU = torch.device("cpu")


def launches(pair: PairPrograms, command: str) -> tuple[list[Shape], dict[tuple[str, str], list[Calls]]]:
    shapes = collect([pair], H200, kinds_of(command))
    return shapes, calls_by_plan(shapes, H200, 2)


def parameters(call: KernelCall) -> tuple[str, ...]:
    return call.kernel.function.__code__.co_varnames[: len(call.arguments)]


def argument(call: KernelCall, name: str) -> Any:
    return call.arguments[parameters(call).index(name)]


def test_rows_that_a_gemm_writes_to_the_cache_have_places_of_their_own() -> None:
    pair = PairPrograms(open_pair(DEMO / "target", DEMO / "head"), H200, Sizes((8,), (3,), 512))
    shapes, calls = launches(pair, "gemm")
    most = 0
    for shape in shapes:
        placed = Places(CPU, pair.weights.tensors(), pair.weight_bytes).place(calls[shape.place][0], 0)
        if not isinstance(argument(placed[0], "slots") if shape.kind == "decode_gemm" else None, torch.Tensor):
            continue
        (case,) = cases_of(shape.kind, placed)
        case.fill(placed, 0)
        slots, table, offsets = (argument(placed[0], name) for name in ("slots", "table", "offsets"))
        blocks = table[slots.long(), 0].tolist()
        assert len(set(blocks)) == len(blocks) and len(set(offsets.tolist())) == len(offsets)
        most = max(most, len(blocks) * len(offsets))
    assert most == 32


def test_attention_is_timed_over_blocks_of_its_own_in_every_context() -> None:
    pair = PairPrograms(open_pair(DEMO / "target", DEMO / "head"), H200, Sizes((1, 2), (0, 3), 2048))
    shapes, calls = launches(pair, "attention")
    assert {"BASE_ATTENTION", "EAGLE3_ATTENTION"} <= {tag for shape in shapes for tag in shape.stages}
    for shape in shapes:
        places = Places(CPU, pair.weights.tensors(), pair.weight_bytes)
        placed = places.place(calls[shape.place][0], 0)
        cases = cases_of(shape.kind, placed)
        longest = argument(placed[0], "width") * argument(placed[0], "k_cache").shape[2]
        assert int(cases[-1].name) <= longest and len({case.name for case in cases}) == len(cases)
        for case in cases:
            used: set[int] = set()
            for copy in range(min(case.copies, 3)):
                call, *rest = case.fill(placed, copy)
                table, masks = argument(call, "table"), argument(call, "row_masks")
                batch, rows = masks.shape
                slots, block = argument(call, "slots").tolist(), argument(call, "k_cache").shape[2]
                assert slots == list(range(batch)) and masks[0].tolist() == [(2 << row) - 1 for row in range(rows)]
                own = {page for slot in slots for page in table[slot, : -(-int(case.name) // block)].tolist()}
                assert len(own) == batch * -(-int(case.name) // block) and not own & (used | {0})
                assert max(own) < argument(call, "k_cache").shape[0]
                used |= own
                dense = argument(call, "dense_lens")
                assert dense.tolist() == [int(case.name) - argument(call, "tail")] * batch
                assert all(argument(each, "dense_lens") is dense for each in rest)
            tables = [argument(case.fill(placed, copy)[0], "table") for copy in (0, case.copies)]
            assert torch.equal(*tables), "copies beyond have the blocks of earlier ones"


def test_a_moe_is_timed_with_rows_that_choose_at_random_and_with_the_extremes(tmp_path: Path) -> None:
    pair = PairPrograms(random_pair("tiny-experts", tmp_path), H200, Sizes((2,), (0, 3)))
    shapes, calls = launches(pair, "experts")
    assert {shape.kind for shape in shapes} == {"experts_mlp", "experts_grouped"}
    for shape in shapes:
        placed = Places(CPU, pair.weights.tensors(), pair.weight_bytes).place(calls[shape.place][0], 0)
        names = [call.kernel.function.__name__ for call in placed]
        assert names[-1] == "experts_mlp" or names == [
            "experts_grouping", "experts_grouped", "experts_grouped", "add_topk_kernel"
        ]  # fmt: skip
        name = "x" if shape.kind == "experts_mlp" else "ids"
        for case, alike in zip(cases_of(shape.kind, placed), (False, True), strict=True):
            first, second = (argument(case.fill(placed, copy)[0], name) for copy in range(2))
            assert not torch.equal(first, second) and case.copies > 1
            if name == "ids":
                counts = first.view(-1).bincount()
                assert (counts.max() == counts.min()) == alike and (first.sort(1).values.diff(dim=1) > 0).all()
            else:
                assert (len(first.unique(dim=0)) == 1) == (alike or len(first) == 1)
        tensors = [each for call in placed for each in call.arguments if isinstance(each, torch.Tensor)]
        assert all(int(each.min()) > 100 for each in tensors if each.dtype == torch.uint8 and each.dim() > 2)


def test_experts_without_biases_are_counted_by_their_weights() -> None:
    moe = make_moe(6, 64, 32, quantised=False, biased=False)
    rows, top_k = 5, 2
    calls = prefill_experts(
        moe.rows(rows), torch.zeros(rows, top_k, dtype=torch.int32), torch.ones(rows, top_k),
        gate_up=moe.up.packed, down=moe.down.packed, activated=torch.empty(rows, top_k, 32).bfloat16(),
        out=torch.empty(rows, 64), workspace=lambda _, shape, dtype: torch.empty(shape, dtype=dtype), gpu=H200,
    )  # fmt: skip
    for case in cases_of("experts_grouped", tuple(calls)):
        ids = next(argument(call, "ids") for call in case.fill(tuple(calls), 0) if "ids" in parameters(call))
        assert ids.shape == (rows, top_k) and 0 <= int(ids.min()) <= int(ids.max()) < 6


def entry_of(kind: str, key: str, knobs: Any, gpu: Gpu) -> Gpu:
    table = TuningTable(
        "", gpu.capability, gpu.num_multiprocessors, gpu.shared_bytes, entries={kind: {key: Entry(knobs)}}
    )
    return Gpu(gpu.num_multiprocessors, gpu.shared_bytes, gpu.capability, tuning=table)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=map(str, GPUS))
@pytest.mark.parametrize("held", [MXFP4, BF16], ids=lambda held: held.name)
def test_a_moe_s_plans_differ_in_knobs_alone_and_a_table_chooses_among_them(held: Any, gpu: Gpu) -> None:
    up, down = ExpertShape(GATE_UP, 5760, 2880, 4, held), ExpertShape(DOWN, 2880, 2880, 4, held)
    for rows in (1, 3, 8, 64):
        plans, (_, planned) = mlp_plans(rows, up, down, gpu), choose_mlp_plan(rows, up, down, gpu, 128)
        assert plans[0] == plan_mlp(rows, up, down, gpu) and planned.candidates == plans and not planned.is_tuned
        assert len({tuple(plan.knobs.values()) for plan in plans}) == len(plans) > 2
        for plan in plans:  # as many warps, which cut K, and as much memory as there is
            assert plan.places[-1] <= gpu.shared_bytes and plan_mlp(rows, up, down, gpu, **plan.knobs) == plan
            assert (plan.up_plan.warps, plan.down_plan.warps) == (plans[0].up_plan.warps, plans[0].down_plan.warps)
        tuned = entry_of("experts_mlp", planned.key, plans[-1].knobs, gpu)
        assert choose_mlp_plan(rows, up, down, tuned, 128)[0] == plans[-1]
        alone, place = choose_expert_plan(rows, down, gpu, 128)
        assert alone == plan_experts(rows, down, gpu) and place.key.startswith(f"kind=down rows={next_power(rows)} ")
        assert {each.warps for each in expert_plans(rows, down, gpu)} == {alone.warps}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=map(str, GPUS))
def test_both_grouped_gemms_of_a_moe_have_one_plan_in_tables(gpu: Gpu) -> None:
    up, down = ExpertShape(GATE_UP, 5760, 2880, 4, MXFP4), ExpertShape(DOWN, 2880, 2880, 4, MXFP4)
    for rows in (64, 512, 2048):
        plans = moe_plans(4 * rows, 128, (up, down), gpu)
        chosen = [choose_moe_plan(4 * rows, 128, shape, gpu) for shape in (up, down)]
        assert chosen[0] == chosen[1] and chosen[0][0] == plans[0] and chosen[0][1].candidates == plans
        assert len({tuple(each.knobs.values()) for each in plans}) == len(plans) > 1
        assert all(
            each.of(shape, gpu).shared_bytes(shape) <= gpu.shared_bytes for each in plans for shape in (up, down)
        )


@pytest.mark.second
def test_tiles_are_listed_without_a_gpu() -> None:
    options = ("tune", "attention", "--list", "--tiles", "--batch", 2, "-S", "0,7")
    found = answer(*options, "--json")
    shapes = {each["key"]: each for each in found["shapes"]}
    assert found["tiles"] and {each["shape"] for each in found["tiles"]} == set(shapes)
    for each in found["tiles"]:
        assert each["total"] == each["empty"] + each["executed"] and each["masked"] <= each["executed"]
        assert each["row_tiles"] in {plan["row_tiles"] for plan in shapes[each["shape"]]["plans"]}
    assert "tiles of 64 positions" in lowlat(*options).output
    assert "--tiles needs --list" in refusal("tune", "--tiles")
    walked = counted(listed([open_pair(DEMO / "target", None)], "attention", [Sizes((1,), (0,))]))
    derived = AttentionPlan(1, 4, 2)
    assert (
        all(each.counts.masked < each.counts.executed for each in walked) and derived.row_tiles == walked[0].row_tiles
    )
