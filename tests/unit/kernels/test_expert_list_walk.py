"""The list of a step's experts and their pairs, walked on a CPU: each way to list has the units of the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_cases import choices
from kernel_walk import Walker, walkable
from stages import later

from lowlat.kernels.formats import BF16
from lowlat.kernels.moe.plan import DOWN, ExpertShape, parts_of, plan_experts
from lowlat.kernels.toolchain.kernel import H200

NAMES = ("moe.plan", "moe.decode.expert_list")


def want_units(ids: list[int], columns: int) -> list[tuple[int, list[int]]]:
    """Units in the order of their first pairs: an expert, and up to so many of its pairs."""
    units: list[tuple[int, list[int]]] = []
    for expert in dict.fromkeys(each for each in ids if each >= 0):
        pairs = [pair for pair, each in enumerate(ids) if each == expert]
        units += [(expert, pairs[first : first + columns]) for first in range(0, len(pairs), columns)]
    return sorted(units, key=lambda unit: unit[1][0])


def list_units(ids: torch.Tensor, top_k: int) -> list[tuple[int, list[int]]]:
    """Run a block's listing of experts, and compare it with the expected one."""
    plan, walker = plan_experts(ids.numel() // top_k, ExpertShape(DOWN, 64, 512, top_k, BF16), H200), Walker(False)
    out = torch.full((plan.list_bytes // 4 + 1,), -7, dtype=torch.int32)
    with walkable(walker, *NAMES) as modules:
        made = modules[-1]
        list_them, ptx, cuda = made.make_list_units(plan, top_k), made.ptx, made.cuda

        def listing(source: int, count: int, target: int) -> None:
            ptx.wait_for_previous_kernel()
            area, thread = ptx.shared_address(cuda.shared.array(shape=0, dtype=torch.float32)), cuda.threadIdx.x
            for pair in range(thread, count, plan.threads):
                ptx.store_shared_u32(area + 4 * pair, ptx.load_global_i32(source + 4 * pair) & 0xFFFFFFFF)
            cuda.syncthreads()
            units = list_them(area, count, thread)
            for word in range(thread, plan.list_bytes // 4, plan.threads):
                ptx.store_global_u32(target + 4 * word, ptx.load_shared_u32(area + 4 * word))
            if thread == 0:
                ptx.store_global_u32(target + plan.list_bytes, units)

        shared, signature = plan.list_bytes, [None] * 3
        kernel = SimpleNamespace(
            function=listing, threads=plan.threads, shared_bytes=shared, cluster=1, signature=signature
        )
        arguments: list[Any] = [ids, ids.numel(), out]
        walker.run(SimpleNamespace(kernel=kernel, grid=(1, 1, 1), arguments=arguments, dependent=True))
    words, capacity, units = out.tolist(), plan.capacity, []
    for unit in range(words[-1]):
        word = words[2 * capacity + unit]
        first = 3 * capacity + unit * plan.columns
        units.append((word & 0xFFFFFF, words[first : first + (word >> 24)]))
    assert all(len(pairs) <= plan.columns for _, pairs in units)
    assert units == want_units(ids.view(-1).tolist(), plan.columns)
    return units


@pytest.mark.parametrize(("rows", "top_k"), [(1, 9), (4, 11), (9, 4), (8, 11)])
@pytest.mark.parametrize("kind", ["random", "shared", "dead", "apart"])
def test_units_come_in_the_order_of_their_first_pairs(rows: int, top_k: int, kind: str) -> None:
    """By a lane a pair, two pairs a lane, and all threads; every row has the last expert, too."""
    experts = 12
    ids = choices(kind, rows, top_k, experts)
    if kind != "apart":
        ids[:, -1] = torch.where(ids[:, -1] < 0, -1, experts)
    list_units(ids.contiguous(), top_k)


@pytest.mark.parametrize(("rows", "kind"), [(40, "dead"), later(70, "random")])
def test_a_thread_lists_several_pairs(rows: int, kind: str) -> None:
    list_units(choices(kind, rows, 9, 12).contiguous(), 9)


def test_launches_of_many_rows_are_few_and_even() -> None:
    """Of up to 128 rows and 1024 pairs; a usual launch has 64 rows and 256 pairs."""
    counts = {top_k: [count for _, count in parts_of(128, top_k, many=True)] for top_k in (4, 8, 9, 11)}
    assert counts == {4: [128], 8: [128], 9: [64, 64], 11: [64, 64]}
    assert [count for _, count in parts_of(128, 8)] == [32] * 4 and [*parts_of(20, 8, many=True)] == [*parts_of(20, 8)]


def test_no_units_of_dead_rows() -> None:
    assert not list_units(torch.full((4, 9), -1, dtype=torch.int32), 9)
