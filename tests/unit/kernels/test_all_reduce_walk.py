"""Rows exchanged among ranks, walked thread by thread on a CPU: all ranks side by side, in any order."""

from typing import Any

import pytest
import torch
from all_reduce_cases import EPS, Ranks, tree_sum
from kernel_walk import Walker, walkable
from rowwise_cases import canonical_norm, flags, poison, same_bits, weights
from stages import wide

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.collectives import all_reduce
from lowlat.kernels.collectives import shares as row_shares
from lowlat.kernels.collectives.peers.words import HOST_GAVE_UP, awaited_code
from lowlat.kernels.step import forward_commands

pytestmark = pytest.mark.second

F32 = torch.float32
NAMES = ("collectives.peers.words", "collectives.all_reduce")
CASES = [
    (2, 1088, 2, (2, 1)),  # two blocks a row, the last one not full
    (3, 24, 2, (1, 2)),
    (4, 24, 2, (5,)),  # by three launches
]


@pytest.mark.parametrize(("count", "width", "most", "runs"), CASES)
def test_all_ranks_gather_and_add_the_same(count: int, width: int, most: int, runs: tuple[int, ...]) -> None:
    ranks, wanted, found = Ranks(count, most, width), [], []
    with walkable(walker := Walker(), *NAMES) as modules:
        kernels: Any = modules[-1]
        channels = ranks.channels(kernels.Channel)
        streams: list[list[Any]] = [[] for _ in range(count)]
        for rows in runs:
            parts, a = ranks.inputs(rows), torch.randn(rows, width).to(torch.bfloat16)
            total, gathered = tree_sum(parts), torch.stack(parts)
            gathered[1, :, width - 11 :] = 0
            for part, channel, stream in zip(parts, channels, streams, strict=True):
                outs = poison(count, rows, width, dtype=F32), poison(rows, width, dtype=F32), poison(rows, width)
                own = part[:, : width - 11 * (channel.rank == 1)].contiguous()  # one rank's part is narrower
                stream += kernels.gather_ranks(own, channel=channel, out=outs[0])
                stream += kernels.all_reduce(part, channel=channel, out=outs[1])
                stream += kernels.all_reduce_add(part, a, channel=channel, total=outs[2])
                found.append(outs)
                wanted.append((gathered, total, (a.float() + total).to(torch.bfloat16)))
        walker.run(*streams[0], beside=streams[1:])
    for outs, expected in zip(found, wanted, strict=True):
        assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))


def test_norms_have_the_bits_of_one_gpu() -> None:
    ranks, rows, found = Ranks(2, 2, 4104, whole=True), 2, []  # one thread has two chunks
    parts, a, weight = ranks.inputs(rows), torch.randn(rows, 4104).to(torch.bfloat16), weights(4104)
    live = flags(rows)
    with walkable(walker := Walker(), *NAMES) as modules:
        kernels: Any = modules[-1]
        streams = []
        for part, channel in zip(parts, ranks.channels(kernels.Channel), strict=True):
            found.append((total := poison(rows, 4104), out := poison(rows, 4104)))
            given: Any = {"channel": channel, "total": total, "out": out, "eps": EPS}
            streams.append(kernels.all_reduce_add_norm(part, a, weight, live, **given))
        walker.run(*streams[0], beside=streams[1:])
    expected = (a.float() + tree_sum(parts)).to(torch.bfloat16)
    normed = torch.where(live[:, None] != 0, canonical_norm(expected, weight, EPS), 0)
    for total, out in found:
        assert same_bits(total, expected)
        assert same_bits(out, normed)


@pytest.mark.parametrize(("count", "rows", "most", "width"), [(3, 8, 9, 40), wide(2, 3, 3, 4104)])
def test_every_rank_adds_up_its_share_of_many_rows(count: int, rows: int, most: int, width: int) -> None:
    """Twice with the norm and once without, fewer rows then: the bits of one GPU, on all ranks."""
    areas = tuple(torch.zeros(row_shares.share_words(count, most, width), dtype=torch.int64) for _ in range(count))
    abort, found, wanted = torch.zeros(1, dtype=torch.int64), [], []
    given = [(Ranks(count, most, width).inputs(rows - turn), torch.randn(rows - turn, width)) for turn in range(3)]
    weight = weights(width)
    with walkable(walker := Walker(), *NAMES, "collectives.shares") as modules:
        kernels, streams = modules[-1], []
        for rank in range(count):
            shares = kernels.RowShares(rank, areas, most, width, abort)
            calls = []
            for turn, (parts, a) in enumerate(given):
                a, live = a.bfloat16(), flags(len(a))
                total, out = poison(*a.shape), poison(*a.shape)
                if turn == 1:
                    calls += kernels.share_add(parts[rank], a, shares=shares, total=total)
                else:
                    named: Any = {"shares": shares, "total": total, "out": out, "eps": EPS}
                    calls += kernels.share_add_norm(parts[rank], a, weight, live, **named)
                expected = (a.float() + tree_sum(parts)).bfloat16()
                normed = torch.where(live[:, None] != 0, canonical_norm(expected, weight, EPS), 0)
                found += [total] if turn == 1 else [total, out]
                wanted += [expected] if turn == 1 else [expected, normed]
            streams.append(calls)
        walker.run(*streams[0], beside=streams[1:])
    assert all(same_bits(out, want) for out, want in zip(found, wanted, strict=True))
    assert int(abort[0]) == 0


@pytest.mark.parametrize("by_host", [True, False])
def test_a_wait_for_a_rank_that_never_comes_ends(by_host: bool) -> None:
    """Its block then waits no more, and what it writes is NaN."""
    ranks, outs = Ranks(3, 1, 16), [poison(1, 16, dtype=F32) for _ in range(2)]
    ranks.abort[0] = HOST_GAVE_UP if by_host else 0
    with walkable(walker := Walker(), *NAMES) as modules:
        words: Any = modules[0]
        kernels: Any = modules[-1]
        words.ABORT_TURNS = words.PEER_SPIN_LIMIT = 4
        calls = [
            call
            for out, part in zip(outs, ranks.inputs(1), strict=False)
            for call in kernels.all_reduce(part, channel=ranks.channels(kernels.Channel)[1], out=out)
        ]
        walker.run(calls[0])
        ranks.abort[0], reason = 0, int(ranks.abort[0])
        walker.run(calls[1])
    assert all(bool(out.isnan().all()) for out in outs)
    assert reason == HOST_GAVE_UP if by_host else awaited_code(reason) == (1, 0)
    assert ranks.counters[1][0].tolist() == [2, 1, 0, 0]
    assert int(ranks.abort[0]) == 0


@pytest.mark.parametrize("by_host", [True, False])
def test_shares_of_ranks_that_never_come_are_missing_on_all_that_wait(by_host: bool) -> None:
    """Rank 1 of 3 gives up: all rows are NaN there, in its next launch as well, and its own are at its peers."""
    count, rows, width, abort = 3, 5, 40, torch.zeros(1, dtype=torch.int64)
    areas = tuple(torch.zeros(row_shares.share_words(count, rows, width), dtype=torch.int64) for _ in range(count))
    abort[0], weight = HOST_GAVE_UP if by_host else 0, weights(width)
    with walkable(walker := Walker(), *NAMES, "collectives.shares") as modules:
        words: Any = modules[0]
        kernels: Any = modules[-1]
        words.ABORT_TURNS = words.PEER_SPIN_LIMIT = 4
        shares = kernels.RowShares(1, areas, rows, width, abort)
        for turn in range(2):
            a, total, out = torch.randn(rows, width).bfloat16(), poison(rows, width), poison(rows, width)
            part: Any = Ranks(count, rows, width).inputs(rows)[1]
            named: Any = {"shares": shares, "total": total, "out": out, "eps": EPS}
            walker.run(*kernels.share_add_norm(part, a, weight, None, **named))
            assert bool(total.isnan().all()) and bool(out.isnan().all())
            if not turn:
                reason, abort[0] = int(abort[0]), 0
    assert reason == HOST_GAVE_UP if by_host else awaited_code(reason)[0] == 1
    sums_at = row_shares._sums_at(count, rows, width) // 2
    for peer in (0, 2):
        sums = areas[peer].view(torch.bfloat16)[sums_at:].view(rows, width)
        assert bool(sums[1::count].isnan().all()) and not bool(sums[0::count].any())
    assert int(abort[0]) == 0


def test_what_does_not_fit_is_refused() -> None:
    ranks = Ranks(2, 2, 64)
    channel = ranks.channels()[0]
    part = torch.zeros(2, 64)
    with pytest.raises(ShapeError, match="whole rows"):
        all_reduce.all_reduce_add_norm(
            part, part.bfloat16(), torch.zeros(64).bfloat16(), channel=channel, total=part, out=part, eps=EPS
        )
    with pytest.raises(ShapeError, match="takes no"):
        all_reduce.all_reduce(torch.zeros(2, 32), channel=channel, out=part)
    with pytest.raises(ShapeError, match="multiple of 8"):
        all_reduce.channel_shapes(2, 1, 12)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        all_reduce.Channel(2, ranks.areas, ranks.counters[0], ranks.abort)


def test_commands_reach_all_ranks_at_the_same_step() -> None:
    """The host writes while nobody or some have begun; a rank that gave up keeps its count, and ends its loop."""
    count, tail, stop, abort = 3, *(torch.zeros(1, dtype=torch.int64) for _ in range(3))
    areas = tuple(torch.zeros(forward_commands.AREA_SHAPE, dtype=torch.int64) for _ in range(count))
    counters = [torch.zeros(4, dtype=torch.int32) for _ in range(count)]
    forwarded = [torch.full((2,), -1, dtype=torch.int64) for _ in range(count)]
    with walkable(walker := Walker(), "collectives.peers.words", "step.forward_commands") as modules:
        words: Any = modules[0]
        kernels: Any = modules[-1]
        words.ABORT_TURNS = 4

        def launch(rank: int) -> Any:
            channel = kernels.CommandChannel(rank, areas, counters[rank], forwarded[rank], abort)
            return kernels.forward_commands(tail, stop, channel=channel)[0]

        for commands, stops in ((5, 0), (2**33 + 7, 0), (2**33 + 8, 1)):
            tail[0], stop[0] = commands, stops
            walker.run(launch(0))
            tail[0] += 1  # too late
            walker.run(launch(2), beside=[[launch(1)]])
            assert [each.tolist() for each in forwarded] == [[commands, stops]] * count
        abort[0] = HOST_GAVE_UP
        walker.run(launch(1))
        assert forwarded[1].tolist() == [2**33 + 8, 1]
        walker.run(launch(0))
        assert forwarded[0].tolist() == [2**33 + 9, 1]
