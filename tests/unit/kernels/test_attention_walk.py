"""The attention kernels themselves, walked thread by thread on a CPU: what they compute, read and leave alone.

Small sizes; the walker checks every address, and copies arrive both as late and as early as they can.
"""

import math
from typing import Any

import pytest
import torch
from attention_cases import Case, chain, check, tree
from kernel_walk import Walker, walkable
from stages import later, wide

from lowlat.kernels.toolchain.kernel import H200, Gpu

NAMES = ("attention.plan", "attention.combine")
HEAD_DIM = 64
SMALL = Gpu(170, 99 * 1024, (12, 0))


def run(case: Case, late: bool, **options: Any) -> torch.Tensor:
    """The kernels' result; every float of the workspace is NaN at first."""
    out = torch.full_like(case.q.reshape(case.q.shape[0], -1), math.nan)

    def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype)

    walker = Walker(late, may_leave=True)
    with walkable(walker, *NAMES, "attention.attention") as modules:
        calls = modules[-1].attention(
            **case.arguments(), **case.options, **options, out=out, workspace=workspace, early_metadata=True
        )
        for call in calls:
            walker.run(call)
    return out


@pytest.mark.parametrize(
    ("lengths", "rows", "late"),
    [later([200], "one", False), ([0, 130], "chain", True), later([191], "tree", False), ([64, 40], "dead", True)],
)
def test_a_short_window_is_the_reference_s(lengths: list[int], rows: str, late: bool) -> None:
    """Windows of three and four tiles, of one, and of none; rows that begin elsewhere; a dead row among live ones."""
    masks = {"one": [1], "chain": chain(3), "tree": tree(3, 2), "dead": chain(2)}[rows]
    kv_heads = 2 if rows == "one" else 1
    case = Case(
        lengths, [masks] * len(lengths), head_dim=HEAD_DIM, group=2, kv_heads=kv_heads, block=16, device="cpu",
        window=128, live=[1, 0, 1, 1] if rows == "dead" else None,
        sinks=torch.tensor([0.5, -3.0, 1.5, 0.0][: 2 * kv_heads]),
    )  # fmt: skip
    check(run(case, late, num_blocks=3 if rows == "one" else 2), case.expected())  # one block more than there are items


@pytest.mark.parametrize(("rows", "late", "window"), [wide("dead", True, None), ("chain", True, 128)])
def test_rows_that_are_made_late_are_read_behind_the_wait(rows: str, late: bool, window: int | None) -> None:
    """Whole tiles before the rows are copied before; splits of 128."""
    masks = {"chain": chain(2), "tree": tree(3, 2), "dead": chain(2)}[rows]
    case = Case(
        [150], [masks], head_dim=HEAD_DIM, group=2, kv_heads=1, block=16, device="cpu", window=window,
        live=[1, 0] if rows == "dead" else None,
    )  # fmt: skip
    check(run(case, late, num_blocks=2, split=128, early_rows=False), case.expected())


SCALES = torch.tensor([[0.5, 0.04], [1.0, 0.75]]).bfloat16().float()


@pytest.mark.parametrize(
    ("head_dim", "lengths", "window", "late", "gpu"),
    [
        later(64, [10], None, True, H200),
        wide(64, [10], None, False, Gpu(108, 163 * 1024, (8, 0))),
        wide(64, [70], 128, False, H200),
    ],
)
def test_codes_are_the_reference_s(head_dim: int, lengths: list[int], window: int | None, late: bool, gpu: Gpu) -> None:
    """Heads of both sizes, scales by head, queries of far sizes; codes that the GPU converts, or shifts do; a row
    whose key, or value, is no number is none, and leaves the others.

    Of a query of 2**20 the largest score takes all, so no two may be as near as sums are rounded: one draw in a hundred
    has such, hence always the same.
    """
    torch.manual_seed(3)
    kv_heads = 1 if head_dim == 128 else 2
    case = Case(
        lengths, [[1, 3, 5, 9]], head_dim=head_dim, group=4, kv_heads=kv_heads, block=16, device="cpu", window=window,
        kv_scales=SCALES[:, :kv_heads].contiguous(),
    )  # fmt: skip
    case.q[1] *= 2.0**20
    case.q[3] *= 2.0**-100
    place = lengths[0] + 2
    case.caches[late][case.table[0, place // 16], :, place % 16, 5] = 255
    found, expected = run(case, late, num_blocks=2, gpu=gpu), case.expected()
    check(found[[0, 1, 3]], expected[[0, 1, 3]])
    assert found[2].isnan().all() and expected[2].isnan().any()


@pytest.mark.parametrize(("rows", "late"), [later("chain", True), ("tree", False)])
def test_splits_and_their_sum_are_the_reference_s(rows: str, late: bool) -> None:
    """Two splits, and one; a slot's pipeline begins while another's ends; a tree's rows one after the other."""
    lengths, masks, kv_heads = ([290, 70], chain(2), 2) if rows == "chain" else ([290], tree(3, 2), 1)
    case = Case(lengths, [masks] * len(lengths), head_dim=HEAD_DIM, group=2, kv_heads=kv_heads, block=16, device="cpu")
    check(run(case, late, num_blocks=3), case.expected())


@pytest.mark.parametrize(
    ("lengths", "rows", "window", "coded", "gpu"),
    [
        later([70], "one", None, False, H200),
        wide([130], "dead", None, False, SMALL),
        wide([300], "chain", 100, False, H200),
        wide([70], "one", None, True, Gpu(108, 163 * 1024, (8, 0))),
    ],
)
def test_heads_of_256_are_the_reference_s(
    lengths: list[int], rows: str, window: int | None, coded: bool, gpu: Gpu
) -> None:
    """Query rows of half a tile, of one, of two; one stage, and several; windows that a block takes whole, or not."""
    masks = {"one": [1], "dead": chain(2), "chain": chain(3), "tree": tree(3, 2)}[rows]
    case = Case(
        lengths, [masks] * len(lengths), head_dim=256, group=8 if window is None else 3, kv_heads=1, block=16,
        device="cpu", window=window, live=[0, 1] if rows == "dead" else None,
        kv_scales=SCALES[:, :1].contiguous() if coded else None,
    )  # fmt: skip
    check(run(case, rows != "one", num_blocks=2, split=128, gpu=gpu), case.expected())


@pytest.mark.parametrize(
    ("lengths", "rows", "window", "coded", "softcap", "gpu"),
    [
        later([70], "one", None, False, None, H200),
        wide([70, 0], "tree", None, False, None, H200),
        wide([300], "chain", 100, False, 2.0, H200),
        wide([150], "tree", None, True, 2.0, H200),
        wide([70], "one", None, False, None, SMALL),
        wide([150], "tree", None, False, None, SMALL),
        wide([70], "one", None, True, None, SMALL),
    ],
)
def test_heads_of_512_are_the_reference_s(
    lengths: list[int], rows: str, window: int | None, coded: bool, softcap: float | None, gpu: Gpu
) -> None:
    """Two warps for each 16 positions, of which each has half of the dimensions; keys and values in turns where shared
    memory has no place for both. A value that is not finite, in the
    second half, breaks all of the rows that see it, and no other."""
    masks = {"one": [1], "chain": chain(3), "tree": tree(3, 2)}[rows]
    case = Case(
        lengths, [masks] * len(lengths), head_dim=512, group=8 if window is None else 3, kv_heads=1, block=16,
        device="cpu", window=window, kv_scales=SCALES[:, :1].contiguous() if coded else None, softcap=softcap,
    )  # fmt: skip
    if softcap is not None:
        case.q *= 4
    found = run(case, rows != "one", num_blocks=2, split=128, gpu=gpu)
    check(found, case.expected())
    if gpu is SMALL and not coded:
        assert torch.equal(found, run(case, rows == "one", num_blocks=1, split=128))
    if rows == "chain":
        place = lengths[0] + 2
        case.caches[1][case.table[0, place // 16], :, place % 16, 400] = math.inf
        broken = run(case, False, num_blocks=1, split=128, gpu=gpu)
        assert torch.equal(broken[:2], found[:2]) and broken[2].isnan().all()


@pytest.mark.parametrize(("head_dim", "coded"), [later(64, False), wide(128, True)])
def test_scores_are_capped(head_dim: int, coded: bool) -> None:
    """Scores far above the cap, of both signs, and small ones."""
    scales = SCALES[:, :1].contiguous() if coded else None
    case = Case(
        [70], [chain(2)], head_dim=head_dim, group=4, kv_heads=1, block=16, device="cpu", kv_scales=scales, softcap=5.0
    )
    case.q[:, 1], case.q[:, 2] = case.q[:, 1] * 30, case.q[:, 2] * 0.01
    check(run(case, True, num_blocks=2, split=128), case.expected())


@pytest.mark.parametrize(("coded", "head_dim"), [(True, 64), wide(False, 256), wide(False, 512)])
def test_a_row_has_the_same_bits_in_any_company(coded: bool, head_dim: int) -> None:
    """With dead neighbours; and alone, where its query rows are half a tile."""
    scales = SCALES[:, :1].contiguous() if coded else None
    case = Case(
        [130], [chain(3)], head_dim=head_dim, group=4, kv_heads=1, block=16, device="cpu", window=100, kv_scales=scales
    )
    together = run(case, True, num_blocks=2)
    case.live = torch.tensor([0, 1, 0], dtype=torch.uint8)
    among_dead = run(case, False, num_blocks=1)
    assert torch.equal(among_dead[1], together[1]) and not among_dead[[0, 2]].any()
    case.q, case.lengths, case.masks, case.live = case.q[1:2], [131], [[1]], case.live[1:2]
    assert torch.equal(run(case, True, num_blocks=1)[0], together[1])


def test_a_row_whose_window_begins_later_than_its_neighbours_has_the_bits_of_the_row_alone() -> None:
    """Tiles 0 to 3 are read for three rows together, 1 to 3 for the last alone: the same warps must add up the same
    tiles. Values that all but cancel show the order: what they leave depends on when the smallest comes."""
    case = Case([190], [chain(3)], head_dim=HEAD_DIM, group=2, block=16, device="cpu", window=128)
    case.q.zero_()
    for position in range(64, 193):  # all of the last row's weights are equal
        value = 1.0 if position == 192 else 2.0**26 if position < 128 else -(2.0**26)
        page = int(case.table[0, position // 16])
        case.caches[1][page, :, position % 16] = 0.0 if position in (64, 128) else value
    together = run(case, True, num_blocks=1)
    case.q, case.lengths, case.masks = case.q[2:3], [192], [[1]]
    case.live = torch.ones(1, dtype=torch.uint8)
    assert torch.equal(run(case, False, num_blocks=1)[0], together[2])


@pytest.mark.parametrize("early", [wide(False), True])
def test_sums_of_many_splits_are_one(early: bool) -> None:
    """More splits than a warp has lanes, in one slot, few in another, none in the last; peaks so far apart that whoever
    missed the largest would overflow; a split that saw nothing; a dead row."""
    dense, batch, rows, group, splits = [9990, 700, 300], 3, 2, 3, 41
    generator = torch.Generator().manual_seed(3)
    peaks = torch.rand(batch, splits, rows * group, generator=generator) * 300 - 150
    peaks[:, 1, 2], peaks[0, 39] = -math.inf, 200.0
    norms = torch.rand(batch, splits, rows * group, generator=generator) + 0.5
    values = torch.randn(batch, splits, rows * group, HEAD_DIM, generator=generator)
    sinks, live = torch.tensor([0.3, -2.0, 60.0]), torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.uint8)
    counts = [-(-(length + rows) // 256) for length in dense]
    for slot, count in enumerate(counts):  # what lies after is never read
        peaks[slot, count:], norms[slot, count:], values[slot, count:] = math.nan, math.nan, math.nan
    out = torch.full((batch * rows, group * HEAD_DIM), math.nan).bfloat16()
    with walkable(walker := Walker(may_leave=True), *NAMES) as modules:
        shape = modules[0].AttentionShape(HEAD_DIM, group, 1, 16, 0, None, 0, 1, 3, True, early)
        call = modules[-1].combine_splits(
            shape, values, torch.stack([peaks, norms], -1).contiguous(),
            slots=torch.tensor([4, 0, -1], dtype=torch.int32), dense_lens=torch.tensor(dense, dtype=torch.int32),
            row_live=live, sinks=sinks, out=out, rows=rows, tail=rows, capacity=splits,
        )  # fmt: skip
        walker.run(call)
    wanted = torch.zeros(batch, rows * group, HEAD_DIM, dtype=torch.float64)
    for slot, count in enumerate(counts[:2]):  # the last slot is empty
        sink = sinks.double().repeat(rows) * math.log2(math.e)
        largest = torch.maximum(peaks[slot, :count].double().amax(0), sink)
        factors = torch.exp2(peaks[slot, :count].double() - largest)
        norm = (factors * norms[slot, :count]).sum(0) + torch.exp2(sink - largest)
        wanted[slot] = (factors[..., None] * values[slot, :count]).sum(0) / norm[:, None]
    wanted = wanted.reshape(batch * rows, group * HEAD_DIM) * live[:, None]
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=1e-6)
