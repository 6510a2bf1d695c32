"""Counts of attention's tiles against the steps of the kernel itself, walked thread by thread; and its plans."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, chain, tree
from kernel_inventory import GPUS
from kernel_walk import Walker, walkable
from stages import wide

from lowlat.kernels.attention.launch_plan import (
    STATIC_BYTES,
    AttentionPlan,
    AttentionWork,
    candidate_plans,
    choose_attention_plan,
    pipeline_bytes,
)
from lowlat.kernels.attention.tile_counts import TileCounts, count_tiles
from lowlat.kernels.toolchain.kernel import H200, Gpu

NAMES = ("attention.tile", "attention.attention")
WARPS = 4


def walked(case: Case, plan: AttentionPlan, tail: int | None, num_blocks: int) -> tuple[torch.Tensor, TileCounts]:
    """The kernel's result, and its steps: of each warp's first lane, those that attend and those that multiply."""
    out, seen = torch.full_like(case.q.reshape(case.q.shape[0], -1), math.nan), Counter[str]()

    def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype)

    def counted(name: str, function: Any) -> Any:
        def count(*arguments: Any) -> Any:
            lane = next(each for each in reversed(arguments) if not isinstance(each, tuple))
            seen[name] += int(lane) == 0
            return function(*arguments)

        return count

    walker = Walker(may_leave=True)
    with walkable(walker, *NAMES) as modules:
        tile: Any = modules[0]
        kernel: Any = modules[-1]
        score, hide, attend = tile._make_score, tile._make_hide, kernel.make_attend
        tile._make_score = lambda shape: counted("executed", score(shape))
        tile._make_hide = lambda shape: counted("masked", hide(shape))
        kernel.make_attend = lambda shape: counted("total", attend(shape))
        calls = kernel.attention(
            **case.arguments(), **case.options, out=out, workspace=workspace, early_metadata=True, plan=plan, tail=tail,
            num_blocks=num_blocks,
        )  # fmt: skip
        walker.run(*calls)
    total, masked, executed = (seen[name] for name in ("total", "masked", "executed"))
    assert not total % WARPS and not executed % WARPS
    return out, TileCounts(*(count // WARPS for count in (total, total - executed, masked, executed)))


@pytest.mark.parametrize(
    ("lengths", "masks", "options"),
    [
        wide([290, 70], chain(2), {}),
        wide([70], tree(4, 2), {"group": 5}),
        ([130], tree(5, 3), {"group": 8}),
        ([60], tree(4, 4), {"window": 100, "group": 5, "live": [1, 1, 0, 1]}),
        wide([330], chain(3), {"window": 65, "keep_first": 70, "first": 1}),
        wide([300], tree(2, 1), {"window": 257, "tail": 8}),
    ],
    ids=str,
)
@pytest.mark.second
def test_tiles_are_counted_as_the_kernel_walks_them_and_no_plan_changes_a_bit(
    lengths: list[int], masks: list[int], options: dict[str, Any]
) -> None:
    tail = options.get("tail")
    facts = {"group": 2, **{name: value for name, value in options.items() if name != "tail"}}
    case = Case(lengths, [masks] * len(lengths), head_dim=64, kv_heads=1, block=16, device="cpu", **facts)
    work = AttentionWork(
        len(lengths), len(masks), facts["group"], 1, 64, facts.get("window"), facts.get("keep_first", 0), 256
    )
    plans = {plan.row_tiles: plan for plan in candidate_plans(work, H200)}  # the last of each, of as few stages as any
    results = []
    for plan, num_blocks in itertools.product(plans.values(), (1, 12)):  # with 12 an item has one tile of query rows
        result, found = walked(case, plan, tail, num_blocks)
        live = None if "live" not in facts else [bool(each) for each in facts["live"]]
        counts = count_tiles(
            work, plan, lengths, [masks] * len(lengths), num_blocks=num_blocks, live=live, tail=tail,
            first=facts.get("first", 0),
        )  # fmt: skip
        assert counts == found
        assert counts.total == counts.empty + counts.executed and 0 < counts.masked <= counts.executed
        results.append(result.view(torch.int16))
    assert all(torch.equal(result, results[0]) for result in results)


def test_counts_of_a_long_context() -> None:
    """By hand: 16K positions and four rows of a chain in each of four slots, eight heads."""
    work = AttentionWork(4, 4, 4, 8, 128, None, 0, 512)
    plan, masks = candidate_plans(work, H200)[0], [chain(4)] * 4
    assert count_tiles(work, plan, [16380] * 4, masks, num_blocks=264) == TileCounts(8 * 4 * 256, 0, 8 * 4, 8 * 4 * 256)
    grown = AttentionWork(4, 8, 4, 8, 128, None, 0, 512)  # two tiles of query rows, read twice or shared
    for row_tiles, turns in ((1, 2), (2, 1)):
        counts = count_tiles(grown, AttentionPlan(row_tiles, 3, 2), [16384] * 4, [chain(8)] * 4, num_blocks=264)
        assert counts.total == 8 * 4 * turns * 257 and counts.empty == 0


@pytest.mark.parametrize("gpu", GPUS.values(), ids=map(str, GPUS))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 128, 1000])
def test_plans_fit_their_gpu_and_begin_with_the_derived_one(head_dim: int, window: int | None, gpu: Gpu) -> None:
    for rows, group in ((1, 8), (8, 4), (64, 4)):
        work = AttentionWork(3, rows, group, 8, head_dim, window, 0, 256)
        plans = candidate_plans(work, gpu)
        assert len(set(plans)) == len(plans) == len({tuple(plan.knobs.values()) for plan in plans})
        for plan in plans:
            teams = {64: 3, 128: 2}[head_dim] if work.whole else 1
            most = gpu.shared_bytes if work.whole else gpu.most_bytes(plan.blocks)
            assert pipeline_bytes(head_dim, plan.stages, teams) + STATIC_BYTES <= most
            assert not work.whole or plan.stages == 1, "teams meet in one stage"
        if gpu.capability == H200.capability and window is None and head_dim == 64:
            three = [replace(work, rows=count, group=8) for count in (5, 6)]  # of query rows, which then share keys
            assert {candidate_plans(each, gpu)[0].row_tiles for each in three} == {3}
            assert {each.facts["query_tiles"] for each in three} == {3}
            assert {candidate_plans(replace(each, coded=True), gpu)[0].row_tiles for each in three} == {2}
        if gpu == H200 and window is None:
            several = rows * group > 16
            alone, shared = {64: ((1, 4, 2), (2, 4, 2)), 128: ((1, 3, 2), (2, 2, 2))}[head_dim]
            derived = AttentionPlan(*(shared if several else alone))
            assert plans[0] == derived and {plan.blocks for plan in plans} == {1, 2, 3}
            assert {plan.row_tiles for plan in plans} == ({1, 2} if several else {1})
    facts = choose_attention_plan(work, gpu)[1].key
    assert facts.startswith(f"batch=4 query_tiles=16 group=4 kv_heads=8 head_dim={head_dim} window={window or 0}")
