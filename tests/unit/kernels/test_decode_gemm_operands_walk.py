"""Operands next to a decode GEMM's rows, walked: ranks that add up, best pairs, permuted columns, a block's rows."""

import dataclasses
from typing import Any

import pytest
import torch
from all_reduce_cases import tree_sum
from decode_gemm_walk import SMALL, random, run, walked
from kernel_walk import Walker
from rowwise_cases import flags
from selection_cases import best_of, best_pairs
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.rows import PeerRows, area_shape
from lowlat.kernels.gemm.decode.gemm import (
    BlockRow,
    PartialArgmax,
    decode_gemm,
)
from lowlat.kernels.gemm.packing import gate_up_permutation, pack, rope_permutation, runs_of
from lowlat.kernels.reference.speculation.markov import bias_rows
from lowlat.kernels.sampling.select import BROKEN, FINITE, INFINITY
from lowlat.tools.tune.loopback import looped

pytestmark = pytest.mark.second


@pytest.mark.parametrize(
    ("ranks", "rows", "width", "changes"),
    [
        (2, 1, 80, ({"num_blocks": 2}, {"num_blocks": 1})),
        wide(3, 9, 65, ({"weight_tiles": 2, "stages": 2}, {}, {"areas": 1})),
    ],
)
def test_ranks_add_up_what_they_multiply(
    ranks: int, rows: int, width: int, changes: tuple[dict[str, int], ...]
) -> None:
    """Every rank has the bits of the tree, also where grids are cut otherwise, in one all-reduce after the other; the
    first has a bias."""
    areas = tuple(torch.zeros(area_shape(ranks, rows, width), dtype=torch.int64) for _ in range(ranks))
    abort, residual, bias = torch.zeros(1, dtype=torch.int64), random(rows, width), random(width)
    walker, streams, outs, alone = Walker(), [], [], []
    with walked(walker) as modules:
        thin: Any = modules[-1]
        for rank in range(ranks):
            plan = dataclasses.replace(thin.plan_decode_gemm(rows, width, SMALL), **changes[rank])
            peers, stream = thin.PeerRows(rank, areas, abort), []
            out, part = torch.full((3, rows, width), torch.nan).bfloat16(), torch.zeros(3, rows, width)
            for turn in range(3):
                depth = 72 + 64 * (rank % 2)
                given: dict[str, Any] = {"x": random(rows, depth), "weight": pack(random(width, depth)), "plan": plan}
                given |= {"bias": None if rank else bias, "gpu": SMALL}
                stream += thin.decode_gemm(**given, residual=residual, peers=peers, out=out[turn])
                walker.run(*thin.decode_gemm(**given, out=part[turn]))
            streams.append(stream)
            outs.append(out)
            alone.append(part)
        walker.run(*streams[0], beside=streams[1:])
    expected = (tree_sum(alone) + residual.float()).bfloat16()
    assert bool(expected.isfinite().all()) and all(torch.equal(out, expected) for out in outs)
    assert int(abort[0]) == 0


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), wide(8, 7)])
def test_a_rank_whose_numbers_come_back_to_it_waits_for_nobody(ranks: int, rank: int) -> None:
    """As it is timed on a GPU of its own: it sums what it has sent, again and again, by one plan and another."""
    rows, width, abort = 3, 48, torch.zeros(1, dtype=torch.int64)
    areas = tuple(torch.zeros(area_shape(ranks, rows, width), dtype=torch.int64) for _ in range(ranks))
    residual, walker = random(rows, width), Walker()
    with walked(walker) as modules:
        thin: Any = modules[-1]
        peers = looped(PeerRows(rank, areas, abort))
        for turn in range(3):
            plan = dataclasses.replace(thin.plan_decode_gemm(rows, width, SMALL), stages=1 + turn % 2)
            out, part = torch.full((rows, width), torch.nan).bfloat16(), torch.zeros(rows, width)
            given: dict[str, Any] = {"x": random(rows, 72), "weight": pack(random(width, 72)), "plan": plan}
            walker.run(*thin.decode_gemm(**given, gpu=SMALL, residual=residual, peers=peers, out=out))
            walker.run(*thin.decode_gemm(**given, gpu=SMALL, out=part))
            assert torch.equal(out, (tree_sum([part] * ranks) + residual.float()).bfloat16())
            assert int(peers.areas[rank][0, rank].view(torch.int32)[..., 0].min()) == turn + 1
    assert int(abort[0]) == 0 and not any(area.any() for area in areas)


def test_a_gemm_adds_up_over_ranks_with_a_residual_alone() -> None:
    areas = tuple(torch.zeros(area_shape(2, 1, 48), dtype=torch.int64) for _ in range(2))
    peers = PeerRows(0, areas, torch.zeros(1, dtype=torch.int64))
    good = {"x": random(1, 64), "weight": pack(random(48, 64)), "residual": random(1, 48), "out": random(1, 48)}
    changed = ({"residual": None}, {"x": random(2, 64), "residual": random(2, 48), "out": random(2, 48)})
    for options in changed:
        with pytest.raises(ShapeError, match="ranks add up 1 rows of 48 and a residual, not"):
            decode_gemm(**{**good, **options}, peers=peers, gpu=SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "width", "changes"),
    [
        (1, 200, {}),
        (3, 97, {"weight_tiles": 2, "stages": 2, "num_blocks": 2}),
        (19, 33, {"stages": 1}),
    ],
)
def test_best_pairs_are_left_beside_a_product(rows: int, width: int, changes: dict[str, int]) -> None:
    """Of equal numbers the lowest index; zeros of both signs are equal; places without a block; rows that hold what is
    not finite, where that is asked for, or no number."""
    x, weight = random(rows, 64), random(width, 64)
    weight[width // 2] = weight[width - 2] = weight[width // 2 - 1]
    if rows > 3:
        x[1], x[2, 3], x[3, 0], x[4] = 0, torch.inf, torch.nan, -x[4].abs()
        weight[:, 3] = weight[:, 3].abs()  # plus infinity alone
    for limit in (FINITE, INFINITY):
        out = torch.full((rows, width), torch.nan)
        pairs = torch.full((rows, 5, 2), 77, dtype=torch.int32)
        walker = Walker()
        with walked(walker) as modules:
            best = modules[-1].PartialArgmax(pairs, limit)
            run(walker, modules, changes, x=x, weight=pack(weight), out=out, best=best)
        (largest, low), (want, want_low) = best_of(pairs), best_of(best_pairs(out, limit, blocks=1))
        assert torch.equal(largest, want)
        whole = largest != BROKEN
        assert torch.equal(low[whole], want_low[whole])
        assert not pairs[:, changes.get("num_blocks", 2) :].any()
        if rows > 3:
            assert whole.tolist() == [row != 3 and (row != 2 or limit == INFINITY) for row in range(rows)]


def test_best_pairs_want_places_and_float32() -> None:
    x, weight = random(2, 64), pack(random(48, 64))
    for options, message in (
        ({"out": torch.empty(2, 48).bfloat16()}, "float32 rows, not of bfloat16"),
        ({"best": PartialArgmax(torch.zeros(2, 1, 2, dtype=torch.int32), FINITE)}, "best.pairs has 1 places a row"),
        ({"best": PartialArgmax(torch.zeros(3, 9, 2, dtype=torch.int32), FINITE)}, "best.pairs must"),
    ):
        good = {"out": torch.empty(2, 48), "best": PartialArgmax(torch.zeros(2, 9, 2, dtype=torch.int32), FINITE)}
        with pytest.raises(ShapeError, match=message):
            decode_gemm(x=x, weight=weight, gpu=SMALL, **{**good, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "rows", "wide", "biased", "changes"),
    [
        (rope_permutation(2, 1, 32)[:88], 1, True, True, {}),
        (gate_up_permutation(40), 3, False, True, {"weight_tiles": 2, "stages": 2, "num_blocks": 2}),
        (rope_permutation(2, 1, 32)[:88], 9, True, False, {"num_blocks": 1}),
    ],
    ids=["rope-1", "gate_up-3", "rope-9"],
)
def test_a_permuted_weight_gives_original_columns(
    order: torch.Tensor, rows: int, wide: bool, biased: bool, changes: dict[str, int]
) -> None:
    """The bits of the weight as it was, in float32 and in bf16; also of a last tile that has a run of eight alone."""
    width = len(order)
    x, weight, bias = random(rows, 136), random(width, 136), random(width)
    kind = torch.float32 if wide else torch.bfloat16
    got, want = (torch.full((rows, width), torch.nan, dtype=kind) for _ in range(2))
    walker = Walker()
    with walked(walker) as modules:
        own, plain = (bias[order].contiguous(), bias) if biased else (None, None)
        runs = runs_of(order)
        run(walker, modules, changes, x=x, weight=pack(weight, order), bias=own, columns=runs, out=got)
        run(walker, modules, changes, x=x, weight=pack(weight), bias=plain, out=want)
    assert bool(want.isfinite().all()) and torch.equal(got, want)


@pytest.mark.parametrize(
    ("slots", "wide", "rows", "row", "changes"),
    [
        (1, 1, 3, 2, {"num_blocks": 1}),
        (2, 3, 4, 0, {"weight_tiles": 2, "stages": 2, "num_blocks": 2}),
        wide(4, 2, 2, 1, {}),
    ],
)
def test_a_row_of_a_slot_s_block_is_added(slots: int, wide: int, rows: int, row: int, changes: dict[str, int]) -> None:
    """Bit for bit what the operation makes of the product alone, dead rows zeros; and the best pairs of the sums."""
    x, weight, block = random(slots * wide, 72), random(100, 72), torch.randn(slots * rows, 100)
    live = flags(slots * wide).reshape(slots, wide)
    plain, want, got = (torch.full((slots * wide, 100), torch.nan) for _ in range(3))
    pairs = torch.zeros(slots * wide, 3, 2, dtype=torch.int32)
    walker = Walker()
    with walked(walker) as modules:
        run(walker, modules, changes, x=x, weight=pack(weight), out=plain)
        beside, best = modules[-1].BlockRow(block, wide, row), modules[-1].PartialArgmax(pairs, INFINITY)
        run(walker, modules, changes, x=x, weight=pack(weight), out=got, beside=beside, row_live=live, best=best)
    bias_rows(block, plain, live, out=want, row=row)
    assert bool(want.isfinite().all()) and torch.equal(got, want)
    assert torch.equal(best_of(pairs)[0], best_of(best_pairs(want, INFINITY, blocks=1))[0])


def test_a_row_is_of_each_slot_s_block_and_of_rows_of_one_launch() -> None:
    x, block = random(4, 64), torch.zeros(6, 48)
    good: dict[str, Any] = {"x": x, "weight": pack(random(48, 64)), "out": torch.empty(4, 48), "gpu": SMALL}
    (call,) = decode_gemm(**good, beside=BlockRow(block, 2, 2), row_live=flags(4))
    assert call.kernel.name.endswith("_block2x3")
    for options, message in (
        ({"beside": BlockRow(block, 3, 0)}, "a multiple of 3, not to 4 float32 ones"),
        ({"beside": BlockRow(block, 2, 3)}, "2 slots have no row 3 in a block of 6 rows"),
        ({"beside": BlockRow(block[:5], 2, 0)}, "2 slots have no row 0 in a block of 5 rows"),
        ({"beside": BlockRow(block[:, :40], 2, 0)}, "block must have shape"),
        ({"beside": BlockRow(block, 2, 0), "out": torch.empty(4, 48).bfloat16()}, "not to 4 bfloat16 ones"),
        ({"beside": BlockRow(block, 1, 0), "x": random(9, 64), "out": torch.empty(9, 48)}, "at most 8 float32 rows"),
    ):
        with pytest.raises(ShapeError, match=message):
            decode_gemm(**(good | options))


def test_columns_are_of_plain_products_in_runs() -> None:
    order = gate_up_permutation(24)
    x, residual, out, runs = random(2, 64), random(2, 48), torch.empty(2, 48), runs_of(order)
    good: dict[str, Any] = {"x": x, "weight": pack(random(48, 64), order), "out": out, "columns": runs, "gpu": SMALL}
    assert decode_gemm(**good)[0].kernel.name != decode_gemm(**(good | {"columns": None}))[0].kernel.name
    best = PartialArgmax(torch.zeros(2, 9, 2, dtype=torch.int32), FINITE)
    for options, message in (
        ({"residual": residual, "out": out.bfloat16()}, "columns are of plain GEMMs, not of add ones"),
        ({"activation": "silu", "out": out[:, :24].bfloat16()}, "not of silu ones"),
        ({"best": best}, "or those that keep best pairs"),
        ({"weight": pack(random(50, 64)), "out": torch.empty(2, 50)}, "runs of 8, which do not divide a weight of 50"),
        ({"columns": runs[:5]}, "columns must have shape"),
        ({"columns": runs.long()}, "columns must be torch.int32"),
    ):
        with pytest.raises(ShapeError, match=message):
            decode_gemm(**(good | options))
