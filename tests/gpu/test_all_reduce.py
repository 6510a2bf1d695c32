"""Ranks that exchange rows, on one GPU and on two, each in a stream of its own: bits, order, and waits that end."""

import time
from typing import Any

import pytest
import torch
from all_reduce_cases import EPS, tree_sum
from rowwise_cases import canonical_norm, flags, poison, same_bits, weights

from lowlat.executors.launcher import Launcher
from lowlat.kernels.collectives import all_reduce, shares
from lowlat.kernels.collectives.peers.words import HOST_GAVE_UP
from lowlat.kernels.gemm.decode.gemm import decode_gemm
from lowlat.kernels.gemm.packing import pack
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.tools.all_reduce_times import RankGraphs

pytestmark = pytest.mark.timeout(120)
BF16, F32 = torch.bfloat16, torch.float32


def replay(graphs: RankGraphs, captured: list[Any], parts: list[torch.Tensor], fresh: list[torch.Tensor]) -> None:
    """Run all ranks' graphs over new numbers."""
    for part, numbers in zip(parts, fresh, strict=True):
        part.copy_(numbers)
    for gpu in graphs.peers.devices:
        torch.cuda.synchronize(gpu)
    graphs.start(captured)
    graphs.wait()


@pytest.mark.parametrize(("count", "width", "rows"), [(2, 4096, 1), (2, 2880, 300), (4, 8192, 8), (8, 64, 5)])
def test_replayed_all_reduces_have_the_bits_of_the_tree(
    count: int, width: int, rows: int, rank_gpus: list[torch.device]
) -> None:
    """Many in a graph, replayed with new numbers: words of another all-reduce would show. Half of the ranks on a
    GPU.
    """
    devices = [rank_gpus[rank * 2 // count] for rank in range(count)]
    graphs = RankGraphs(devices, {width: rows})
    scales = torch.logspace(-2, 2, count)
    a, weight, live = torch.randn(rows, width).to(BF16), weights(width), flags(rows)
    parts = [torch.zeros(rows, width, device=device) for device in devices]
    given = [[tensor.to(device) for tensor in (a, weight, live)] for device in devices]
    outs = [
        [poison(count, rows, width, dtype=F32).to(device), *(poison(rows, width).to(device) for _ in range(3))]
        for device in devices
    ]

    def calls(rank: int) -> list[KernelCall]:
        channel, whole = graphs.peers.channel(rank, width), graphs.peers.channel(rank, width, whole=True)
        gathered, added, total, normed = outs[rank]
        own, *norms = given[rank]
        norm = all_reduce.all_reduce_add_norm(parts[rank], own, *norms, channel=whole, total=total, out=normed, eps=EPS)
        return [
            *all_reduce.all_reduce_add(parts[rank], own, channel=channel, total=added),
            *all_reduce.gather_ranks(parts[rank], channel=channel, out=gathered),
            *norm,
        ] * 5

    captured = graphs.capture(calls)
    for _ in range(20):
        fresh = [torch.randn(rows, width) * scale for scale in scales]
        replay(graphs, captured, parts, fresh)
        total = (a.float() + tree_sum(fresh)).to(BF16)
        normed = torch.where(live[:, None] != 0, canonical_norm(total, weight, EPS), 0)
        for found in outs:
            assert torch.equal(found[0].cpu(), torch.stack(fresh))
            for tensor, wanted in zip(found[1:], (total, total, normed), strict=True):
                assert same_bits(tensor.cpu(), wanted)
    assert graphs.peers.problem() is None


@pytest.mark.parametrize("rank_gpus", ["two GPUs"], indirect=True)
@pytest.mark.parametrize(("width", "rows", "most"), [(4096, 2048, 2048), (2880, 333, 512)])
def test_gpus_add_up_their_shares_of_many_rows(width: int, rows: int, most: int, rank_gpus: list[torch.device]) -> None:
    """More blocks than a GPU has room for, one all-reduce after the other: the bits of the tree, and of its norm."""
    graphs = RankGraphs(rank_gpus, {width: most})
    a, weight, live = torch.randn(rows, width).to(BF16), weights(width), flags(rows)
    parts = [torch.zeros(rows, width, device=gpu) for gpu in rank_gpus]
    given = [[tensor.to(gpu) for tensor in (a, weight, live)] for gpu in rank_gpus]
    outs = [[poison(rows, width).to(gpu) for _ in range(3)] for gpu in rank_gpus]

    def calls(rank: int) -> list[KernelCall]:
        memory, (own, *norms), (added, total, normed) = graphs.peers.shares(rank, width), given[rank], outs[rank]
        norm = shares.share_add_norm(parts[rank], own, *norms, shares=memory, total=total, out=normed, eps=EPS)
        return [*shares.share_add(parts[rank], own, shares=memory, total=added), *norm] * 4

    captured = graphs.capture(calls)
    for _ in range(5):
        fresh = [torch.randn(rows, width), 10 * torch.randn(rows, width)]
        replay(graphs, captured, parts, fresh)
        total = (a.float() + tree_sum(fresh)).to(BF16)
        normed = torch.where(live[:, None] != 0, canonical_norm(total, weight, EPS), 0)
        for found in outs:
            for tensor, wanted in zip(found, (total, total, normed), strict=True):
                assert same_bits(tensor.cpu(), wanted)
    assert graphs.peers.problem() is None


@pytest.mark.parametrize("rank_gpus", ["two GPUs"], indirect=True)
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 4096, 2048), (4, 2880, 1440), (64, 8192, 4096)])
def test_gemms_add_up_over_gpus_as_they_finish_tiles(
    rows: int, width: int, depth: int, rank_gpus: list[torch.device]
) -> None:
    """The bits of GEMMs that leave their sums, added up in the ranks' order; rows change from replay to replay."""
    graphs, launchers = RankGraphs(rank_gpus, {width: rows}), [Launcher(gpu) for gpu in rank_gpus]
    x = [torch.randn(rows, depth, device=gpu).to(BF16) for gpu in rank_gpus]
    matrices = [pack(torch.randn(width, depth, device=gpu).to(BF16)) for gpu in rank_gpus]
    residual = torch.randn(rows, width).to(BF16)
    old = [residual.to(gpu) for gpu in rank_gpus]
    outs = [torch.zeros(rows, width, dtype=BF16, device=gpu) for gpu in rank_gpus]

    def calls(rank: int) -> list[KernelCall]:
        given: dict[str, Any] = {"x": x[rank], "weight": matrices[rank], "gpu": launchers[rank].gpu}
        peers = graphs.peers.rows(rank, width, "gemm")
        return decode_gemm(**given, residual=old[rank], peers=peers, out=outs[rank]) * 10

    captured = graphs.capture(calls)
    for _ in range(10):
        alone = []
        for gpu, launcher, own, matrix in zip(rank_gpus, launchers, x, matrices, strict=True):
            part = torch.zeros(rows, width, device=gpu)
            with torch.cuda.device(gpu):
                own.copy_(torch.randn(rows, depth))
                launcher.run(*decode_gemm(x=own, weight=matrix, out=part, gpu=launcher.gpu))
            alone.append(part.cpu())
            torch.cuda.synchronize(gpu)
        graphs.start(captured)
        graphs.wait()
        expected = (residual.float() + tree_sum(alone)).to(BF16)
        assert all(same_bits(out.cpu(), expected) for out in outs)
    assert graphs.peers.problem() is None


def test_the_host_ends_a_wait_for_a_rank_that_never_comes(rank_gpus: list[torch.device]) -> None:
    graphs, parts = RankGraphs(rank_gpus, {64: 1}), [torch.randn(1, 64, device=gpu) for gpu in rank_gpus]
    outs = [part.clone() for part in parts]
    captured = graphs.capture(
        lambda rank: all_reduce.all_reduce(parts[rank], channel=graphs.peers.channel(rank, 64), out=outs[rank]) * 1000
    )
    for gpu in rank_gpus:
        torch.cuda.synchronize(gpu)
    graphs.start(captured[:1])
    time.sleep(0.05)
    with graphs.on_rank(0):
        assert not torch.cuda.current_stream().query()
        start = time.monotonic()
        graphs.peers.give_up()
        torch.cuda.current_stream().synchronize()
    assert time.monotonic() - start < 1.0
    assert int(graphs.peers.abort[0]) == HOST_GAVE_UP
    assert bool(outs[0].isnan().all())
