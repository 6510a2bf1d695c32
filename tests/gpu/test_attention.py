"""Attention over the paged cache against the reference, and its promise: a row's bits are its own."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, chain, check, random_bf16, tree

from lowlat.executors.launcher import Launcher
from lowlat.kernels.attention.attention import attention
from lowlat.kernels.attention.launch_plan import AttentionWork, candidate_plans

DENSE = (0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 2049, 9000)
ROWS = (1, 2, 4, 8, 16, 63)
GROUPS = (1, 3, 4, 5, 8)
SCALES = torch.tensor([[0.5, 0.0390625], [1.0, 0.6015625]])  # of caches of codes, for two heads


class Bench:
    """Launches with one workspace for all calls, as a step has it; floats in it start as NaN."""

    def __init__(self) -> None:
        self.launcher = Launcher(torch.device("cuda", 0))
        self.memory: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Integers are zero at first, the rest is poison."""
        key = name, shape, dtype
        if key not in self.memory:
            fill = math.nan if dtype.is_floating_point else 0
            self.memory[key] = torch.full(shape, fill, dtype=dtype, device="cuda")
        return self.memory[key]

    def run(self, case: Case, **options: Any) -> torch.Tensor:
        """The kernel's result."""
        out = torch.full_like(case.q.reshape(case.q.shape[0], -1), math.nan)
        arguments = {**case.arguments(), **case.options, **options}
        self.launcher.run(*attention(**arguments, out=out, workspace=self.workspace))
        return out


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("scales", [None, SCALES], ids=["numbers", "codes"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_equals_the_reference(bench: Bench, head_dim: int, shape: str, scales: torch.Tensor | None) -> None:
    """All lengths at once, as slots of ragged batches, for all groups and numbers of rows by turns."""
    for index, (rows, lengths) in enumerate(itertools.product(ROWS, (DENSE[:6], DENSE[6:]))):
        group = GROUPS[index % len(GROUPS)]
        masks = [chain(rows) if shape == "chain" else tree(rows, seed) for seed in range(len(lengths))]
        block = (16, 32, 64, 128, 256)[index % 5]
        case = Case(list(lengths), masks, head_dim=head_dim, group=group, block=block, kv_scales=scales)
        want = case.expected()
        check(bench.run(case), want)
        check(bench.run(case, num_blocks=7, early_metadata=True), want)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 4), (128, 3), (256, 8), (256, 6), (512, 4)])
@pytest.mark.parametrize("window", [1, 64, 128, 300, 2100])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_windows_sinks_and_kept_positions(bench: Bench, head_dim: int, group: int, window: int, shape: str) -> None:
    for rows, keep, first, sinks in ((1, 0, 0, True), (4, 4, 1, False), (7, 600, 0, True), (5, 0, 1, True)):
        lengths = [1 + first, 64, 255, 2049, 5000]
        masks = [chain(rows) if shape == "chain" else tree(rows, seed) for seed in range(len(lengths))]
        heads = torch.randn(2 * group, device="cuda") if sinks else None
        case = Case(
            lengths, masks, head_dim=head_dim, group=group, window=window, keep_first=keep, first=first, sinks=heads
        )
        want = case.expected()
        check(bench.run(case), want)
        check(bench.run(case, early_metadata=True, num_blocks=20), want)


@pytest.mark.parametrize("window", [None, 16, 128, 256, 300])
@pytest.mark.parametrize("sink", [1e4, -1e4, 0.0])
def test_extreme_sinks_at_every_edge(bench: Bench, window: int | None, sink: float) -> None:
    """Windows that begin and end around tiles and splits; a large sink takes all, a small one nothing."""
    lengths = [126, 127, 128, 191, 192, 255, 256, 257, 383, 384, 511, 640]
    heads = torch.full((16,), sink, device="cuda")
    for rows, masks in ((4, chain(4)), (7, tree(7, 5))):
        case = Case(lengths, [masks] * len(lengths), head_dim=64, group=8, window=window, sinks=heads)
        got = bench.run(case, early_metadata=True)
        if sink > 0:
            assert not got.any()
        else:
            check(got, case.expected())
        assert got.shape[0] == rows * len(lengths)


@pytest.mark.parametrize("scales", [None, SCALES], ids=["numbers", "codes"])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 4), (256, 8), (512, 8)])
@pytest.mark.parametrize("window", [None, 100, 600])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_no_plan_changes_a_bit(
    bench: Bench, head_dim: int, group: int, window: int | None, shape: str, scales: torch.Tensor | None
) -> None:
    """One tile of query rows and several, over lengths from none to many splits."""
    for rows, split in ((2, 256), (5, 512), (8, 512)):  # of eight heads five rows are three tiles
        masks = [chain(rows) if shape == "chain" else tree(rows, seed) for seed in range(len(DENSE[6:]))]
        case = Case(list(DENSE[6:]), masks, head_dim=head_dim, group=group, window=window, kv_scales=scales)
        work = AttentionWork(len(masks), rows, group, 2, head_dim, window, 0, split, scales is not None)
        results = [  # in a small grid items share keys and values between tiles of query rows
            bench.run(case, plan=plan, split=split, gpu=bench.launcher.gpu, num_blocks=num_blocks)
            for plan, num_blocks in itertools.product(candidate_plans(work, bench.launcher.gpu), (None, 5))
        ]
        check(results[0], case.expected())
        assert all(same(result, results[0]) for result in results)


def test_a_short_window_takes_one_launch_and_reads_nothing_before_it(bench: Bench) -> None:
    """Keys and values before the window's first tile are NaN by the pool's poison: they leave no trace."""
    options: dict[str, Any] = {"head_dim": 64, "group": 8, "window": 128, "sinks": torch.randn(16, device="cuda")}
    case = Case([1000, 130, 64], [chain(4)] * 3, live=[1, 1, 1, 0] + [0] * 4 + [1] * 4, slots=[1, -1, 0], **options)
    want = case.expected()
    positions = torch.arange(0, (1000 - 128) // 64 * 64, device="cuda")
    blocks = case.table[1, positions // 32].long()
    for cache in case.caches:
        cache[blocks, :, positions % 32] = math.nan
    out = torch.full((12, 16 * 64), math.nan, dtype=torch.bfloat16, device="cuda")
    calls = attention(**case.arguments(), **case.options, out=out, workspace=bench.workspace)
    assert len(calls) == 1
    bench.launcher.run(*calls)
    check(out, want)
    assert not out[3:8].any()


def test_no_ancestors_and_first(bench: Bench) -> None:
    """The head's first level: one row, at the last dense position; index 0 was never written."""
    case = Case([2, 64, 300, 2500], [[0]] * 4, head_dim=128, group=4, first=1)
    check(bench.run(case), case.expected())
    nothing = Case([1, 0], [[0]] * 2, head_dim=128, group=4, first=1)
    assert not bench.run(nothing).any()


def test_dead_rows_and_pads_are_zero(bench: Bench) -> None:
    live = [1, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]
    case = Case([300, 70, 40, 2300], [chain(4)] * 4, head_dim=128, group=4, slots=[2, -1, 0, 3], live=live)
    want = case.expected()
    for early in (False, True):
        got = bench.run(case, early_metadata=early)
        check(got, want)
        assert not got[want.abs().sum(1) == 0].any()
        assert not got[4:12].any()


@pytest.mark.parametrize("scales", [None, SCALES], ids=["numbers", "codes"])
@pytest.mark.parametrize(("head_dim", "group", "window"), [(128, 2, None), (256, 2, 300), (512, 8, None)])
def test_scores_are_capped(
    bench: Bench, head_dim: int, group: int, window: int | None, scales: torch.Tensor | None
) -> None:
    """Scores of tens and of hundredths, of both signs, in chains and trees."""
    for cap, masks in ((50.0, chain(4)), (2.0, tree(7, 5)), (2.0, [1])):
        case = Case(
            [5, 700, 2049], [masks] * 3, head_dim=head_dim, group=group, window=window, softcap=cap, kv_scales=scales
        )
        case.q[:, 0], case.q[:, 1] = case.q[:, 0] * 40, case.q[:, 1] * 0.01
        got = bench.run(case, early_metadata=True)
        check(got, case.expected())
        case.options["softcap"] = None
        assert cap > 2 or (got.float() - case.expected().float()).norm() > 0.05 * got.float().norm()


def test_extreme_scores(bench: Bench) -> None:
    """Scores of thousands, of both signs: no overflow, and one key takes all."""
    case = Case([700], [chain(4)], head_dim=128, group=4)
    case.q *= 300
    check(bench.run(case), case.expected())


@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 4), (128, 3), (256, 8), (256, 6), (512, 8), (512, 4)])
@pytest.mark.parametrize("dense", [1, 60, 63, 64, 127, 252, 255, 256, 2044, 2047, 2048, 6143])
@pytest.mark.parametrize("option", ["plain", "window", "sinks", "short window", "long window", "codes", "softcap"])
def test_rows_of_a_chain_have_the_bits_of_rows_alone(
    bench: Bench, head_dim: int, group: int, dense: int, option: str
) -> None:
    """Row r of a chain is the baseline's row at length dense + r; a tree holds the same rows among others."""
    options: dict[str, Any] = {}
    if option == "window":
        options = {"window": 100, "keep_first": 3}
    elif option == "sinks":
        options = {"sinks": torch.randn(2 * group, device="cuda")}
    elif option == "codes":
        options = {"kv_scales": SCALES}
    elif option == "softcap":
        options = {"softcap": 2.0, "kv_scales": SCALES if group == 8 else None}
    elif option != "plain":
        options = {"window": 128 if option == "short window" else 300, "sinks": torch.randn(2 * group, device="cuda")}
    rows = 9
    case = Case([dense], [chain(rows)], head_dim=head_dim, group=group, slots=[1], **options)
    together = bench.run(case)
    q = case.q
    for row in range(rows):
        case.q, case.lengths, case.masks = q[row : row + 1], [dense + row], [[1]]
        case.live = torch.ones(1, dtype=torch.uint8, device="cuda")
        assert same(bench.run(case)[0], together[row]), row
        assert same(bench.run(case, num_blocks=3, early_metadata=True)[0], together[row]), row
    # node 2 i is the chain's i-th; nodes between them are siblings, one of them infinite
    nodes = 2 * rows
    case.move(1, [dense + row for row in range(rows)], [dense + 2 * row for row in range(rows)])
    for row in range(rows):
        scale = math.inf if row == 2 else 1.0
        case.store(1, torch.tensor([dense + 2 * row + 1], device="cuda"), scale=scale)
    case.lengths = [dense]
    case.masks = [[sum(4**k for k in range(node // 2 + 1)) | 1 << node for node in range(nodes)]]
    case.q, case.live = random_bf16(nodes, *q.shape[1:]), torch.ones(nodes, dtype=torch.uint8, device="cuda")
    case.q[0::2] = q
    assert same(bench.run(case)[0::2], together)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_keys_and_values_that_take_turns_change_no_bit(bench: Bench, shape: str, window: int | None) -> None:
    """As on GPUs whose blocks have less shared memory than a tile of heads of 512 takes."""
    small = replace(bench.launcher.gpu, shared_bytes=99 * 1024)
    for rows, group in ((1, 8), (4, 8), (7, 4)):
        masks = [chain(rows) if shape == "chain" else tree(rows, seed) for seed in range(6)]
        case = Case(list(DENSE[6:]), masks, head_dim=512, group=group, window=window)
        want = bench.run(case, early_metadata=True)
        check(want, case.expected())
        for num_blocks in (None, 5):
            assert same(bench.run(case, gpu=small, num_blocks=num_blocks, early_metadata=True), want)


def test_a_broken_draft_leaves_the_rows_before_it(bench: Bench) -> None:
    for shape, head_dim in itertools.product((chain(4), [1, 3, 5, 9]), (128, 512)):
        case = Case([200], [shape], head_dim=head_dim, group=4)
        before = bench.run(case)
        block = case.caches[1].shape[2]
        page = int(case.table[0, 202 // block])
        case.caches[1][page, :, 202 % block, -1] = math.inf
        after = bench.run(case)
        assert same(after[:2], before[:2])
        assert not torch.isfinite(after[2]).any()


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_bits_do_not_depend_on_the_company(bench: Bench, head_dim: int) -> None:
    """The same slot alone, in another batch, at another entry, with more rows, with another grid."""
    lengths, rows = [2047, 130, 4500, 64], 4
    case = Case(lengths, [chain(rows)] * 4, head_dim=head_dim, group=4)
    whole = bench.run(case)
    assert same(bench.run(case), whole)
    for blocks in (1, 13, 264):
        assert same(bench.run(case, num_blocks=blocks), whole)
    q, live = case.q.reshape(4, rows, *case.q.shape[1:]), torch.ones(64, dtype=torch.uint8, device="cuda")
    for entries in ([2], [3, 0], [1, 3, 2, 0]):
        case.slots, case.lengths, case.masks = entries, [lengths[k] for k in entries], [chain(rows)] * len(entries)
        case.q, case.live = q[entries].reshape(-1, *q.shape[2:]).contiguous(), live[: rows * len(entries)]
        got = bench.run(case).reshape(len(entries), rows, -1)
        assert same(got, whole.reshape(4, rows, -1)[entries])
    more = 7
    case.slots, case.lengths, case.masks = [0, 1, 2, 3], lengths, [chain(more)] * 4
    case.q = random_bf16(4, more, *q.shape[2:])
    case.live = torch.tensor([1, 1, 1, 1, 0, 0, 0] * 4, dtype=torch.uint8, device="cuda")
    case.q[:, :rows] = q
    case.q = case.q.reshape(-1, *q.shape[2:])
    got = bench.run(case).reshape(4, more, -1)
    assert same(got[:, :rows], whole.reshape(4, rows, -1))
    assert not got[:, rows:].any()
