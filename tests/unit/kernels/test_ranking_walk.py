"""The last block of a row, walked thread by thread on a CPU: it ranks and sums the row from what its blocks left."""

from typing import Any

import pytest
import torch
from kernel_walk import Walker, walkable

from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import types

NAMES = ("sampling.select", "common.norm_math", "sampling.ranking", "sampling.logprobs.tokens")
LARGEST = (1 << 32) - 1


def last_block(modules: list[Any], chunks: int, stride: int, ranks: int) -> Any:
    """A kernel of one block, the last of a row to arrive: the row's ranked pairs, and its sum of exponentials."""
    select, _, ranking, tokens = modules
    cuda, memory_words = select.cuda, 2 * stride * ranking.count_lists(chunks)
    row_ranks, row_sum = ranking.make_row_ranks(chunks), tokens.make_row_sum(chunks)

    def kernel(partials: Any, sums: Any, counter: Any, out: Any, total: Any) -> None:
        tokens.wait_for_previous_kernel()
        memory, ranked = cuda.shared.array(memory_words, types.uint32), cuda.shared.array(2 * stride, types.uint32)
        flag = cuda.shared.array(1, types.uint32)
        thread = cuda.threadIdx.x
        if thread < 2 * ranks:  # its own list is among those of the others
            own = select.load_global_64(partials + 8 * ((chunks - 1) * stride + thread // 2))
            ranked[thread] = own[thread & 1]
        cuda.syncthreads()
        last = row_ranks(ranked, stride, ranks, partials, counter, chunks - 1, memory, flag)
        assert last
        if thread < 32:
            found = row_sum(memory, stride, sums, select.value_of_key(ranked[0]))
            if thread == 0:
                tokens.store_global_f32(total, found)
        if thread < ranks:
            select.store_global_64(out + 8 * thread, ranked[2 * thread], ranked[2 * thread + 1])

    return Kernel("last_block", kernel, (types.int64,) * 5, select.THREADS)


@pytest.mark.parametrize(("chunks", "stride", "ranks"), [(63, 3, 3), (65, 4, 4), (80, 20, 2), (65, 1, 1)])
def test_a_row_of_many_chunks_is_ranked_and_summed(chunks: int, stride: int, ranks: int) -> None:
    """More chunks than a warp merges at once; many equal numbers, of which the lowest index comes first."""
    width = 4 * stride
    logits = torch.randint(1, 9, (chunks, width)).float()
    logits[chunks - 1, 1] = 9.5
    flat = torch.arange(chunks * width).reshape(chunks, width)
    order = (-logits).sort(dim=1, stable=True).indices[:, :stride]
    keys = logits.gather(1, order).view(torch.int32).long() | 1 << 31
    partials = torch.stack((keys, LARGEST - flat.gather(1, order)), -1)
    partials[:, ranks:] = 0x5A5A5A5A  # nobody reads them
    bits = torch.where(partials > LARGEST >> 1, partials - LARGEST - 1, partials).int()
    sums = (logits - logits.max(1, keepdim=True).values).exp().sum(1)
    counter, out, total = torch.tensor([chunks - 1]).int(), torch.zeros(ranks, 2).int(), torch.zeros(1)
    with walkable(walker := Walker(), *NAMES) as modules:
        kernel = last_block(list(modules), chunks, stride, ranks)
        walker.run(KernelCall(kernel, (1, 1, 1), (bits, sums, counter, out, total)))
    best = (-logits.flatten()).sort(dim=0, stable=True).indices[:ranks]
    assert (LARGEST - (out[:, 1].long() & LARGEST)).tolist() == best.tolist()
    assert not counter.any()
    torch.testing.assert_close(total, (logits - 9.5).exp().sum()[None], rtol=1e-6, atol=0.0)
