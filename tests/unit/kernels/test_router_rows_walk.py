"""The router's kernel of many rows, walked on a CPU: the bits of logits in the order that all routers promise."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_walk import Walker, this_thread, walkable
from rowwise_cases import canonical_logits

from lowlat.kernels.moe.router_rows import LEAST_ROWS, takes_rows
from lowlat.kernels.toolchain.kernel import H200, Gpu


def dots(walker: Walker) -> Any:
    """A stand-in for `ptx_dots`."""

    def dot_rows(rows: int, others: int, turns: int, pitch: int, stride: int) -> Any:
        def values(address: int, turn: int) -> Any:
            words = walker.near(int(address) + turn * stride, 16).view(np.uint16).astype(np.uint32) << 16
            return words.view(np.float32).astype(np.float64)

        def dot(address: int, other_address: int) -> Any:
            sums = np.zeros((rows, others), np.float32)
            for turn in range(turns):
                first = np.stack([values(address + row * pitch, turn) for row in range(rows)])
                second = np.stack([values(other_address + other * pitch, turn) for other in range(others)])
                for column in range(8):
                    sums = (first[:, None, column] * second[None, :, column] + sums).astype(np.float32)
            return tuple(sums.reshape(-1))

        return dot

    def add_across_lanes() -> Any:
        def add(sums: Any, lane: int) -> Any:
            def combine(every: list[Any]) -> list[Any]:
                found = np.array(every, np.float32)
                for distance in (16, 8, 4, 2, 1):
                    found = found + found[np.arange(32) ^ distance]
                return list(np.diagonal(found))

            thread = this_thread()
            return walker.meet(("across", thread.home.key, thread.warp), 32, sums, combine)

        return add

    return SimpleNamespace(dot_rows=dot_rows, add_across_lanes=add_across_lanes)


@pytest.mark.parametrize(("rows", "width", "experts", "biased"), [(19, 1032, 20, True)])
def test_logits_of_many_rows_have_the_bits_of_few(
    rows: int, width: int, experts: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of experts, one of them with four; two turns, one of them with one chunk; rows that fill no batch."""
    x, weight = torch.randn(rows, width).bfloat16(), (torch.randn(experts, width) / width**0.5).bfloat16()
    bias, logits, walker = torch.randn(experts).bfloat16(), torch.full((rows, experts), torch.nan), Walker()
    with walkable(walker, "moe.router_rows", "moe.router") as (kernel, router):
        monkeypatch.setattr(kernel, "ptx_dots", dots(walker))
        monkeypatch.setattr(router, "takes_rows", lambda *_: True)
        walker.run(*router.router_logits(x, weight, bias, logits=logits, gpu=Gpu(2, H200.shared_bytes, (9, 0))))
    assert torch.equal(logits, canonical_logits(x, weight, bias))


def test_rows_that_are_many_and_fit_are_taken() -> None:
    assert takes_rows(LEAST_ROWS, 2880, H200) and not takes_rows(LEAST_ROWS - 1, 2880, H200)
    assert not takes_rows(4096, 4096, H200) and not takes_rows(4096, 2880, Gpu(108, 163 * 1024, (8, 0)))
