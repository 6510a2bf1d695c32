"""The attention kernel without a GPU: what it compiles to, what its builder hands over and what it refuses."""

import math
from typing import Any

import pytest
import torch
from compiled_examples import Compiled, examples_of
from kernel_inventory import GPUS
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.attention import attention as attention_kernels
from lowlat.kernels.attention.attention import attention, attention_bytes
from lowlat.kernels.attention.launch_plan import AttentionPlan, AttentionWork, candidate_plans, takes_turns
from lowlat.kernels.toolchain.compiler import compile_kernel
from lowlat.kernels.toolchain.kernel import Gpu, Kernel, KernelCall

HOPPER = (9, 0)
H200_SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024


@pytest.mark.second
def test_as_many_blocks_fit_on_a_multiprocessor_as_a_plan_says(compiled: Compiled) -> None:
    for kernel in examples_of(attention_kernels):
        code, _ = compiled.of(HOPPER, kernel)
        assert (kernel.most_blocks or 2) * (
            kernel.shared_bytes + code.shared_bytes + RESERVED_BYTES
        ) <= H200_SHARED_BYTES


@pytest.mark.parametrize(
    ("capability", "head_dim", "rows", "coded"),
    [
        wide((8, 0), 256, 4, False),
        wide(HOPPER, 256, 1, False),
        wide(HOPPER, 256, 4, True),
        wide((12, 0), 256, 4, True),
        wide((8, 0), 512, 4, True),
        wide(HOPPER, 512, 1, True),
        wide(HOPPER, 512, 4, False),
        wide((12, 0), 512, 1, False),
        wide((12, 0), 512, 4, True),
    ],
)
def test_wide_heads_have_registers_and_memory(
    capability: tuple[int, int], head_dim: int, rows: int, coded: bool
) -> None:
    """Half a tile of query rows, and whole ones, of 192 numbers a thread: 8.x spills some, and of codes all a few.

    So do those where keys and values take turns.
    """
    work, gpu = AttentionWork(1, rows, 8, 2, head_dim, None, 0, 256, coded), GPUS[capability]
    plan = candidate_plans(work, gpu)[0]
    made = kernel_of(work, plan, gpu)
    code = compile_kernel(made, gpu.capability)
    many = gpu.capability < HOPPER or (takes_turns(work, gpu) and rows > 1)
    assert code.stack_bytes <= (544 if many else 0 if rows == 1 else 32)
    assert made.threads * code.registers * plan.blocks <= 65536
    assert plan.blocks * (made.shared_bytes + code.shared_bytes) <= gpu.shared_bytes + plan.blocks * RESERVED_BYTES


def kernel_of(work: AttentionWork, plan: AttentionPlan, gpu: Gpu) -> Kernel:
    """The first launch's kernel."""
    given: dict[str, Any] = {"gpu": gpu, "plan": plan, "early_metadata": True}
    if work.coded:
        coded = torch.zeros(9, work.kv_heads, 32, work.head_dim, dtype=torch.uint8)
        given |= {"k_cache": coded, "v_cache": coded, "kv_scales": torch.ones(2, work.kv_heads)}
    made = call(1, work.rows, work.group, work.kv_heads, work.head_dim, change=given)
    return made[0].kernel


def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call(
    batch: int = 2,
    rows: int = 4,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    block: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    change: dict[str, Any] | None = None,
) -> list[KernelCall]:
    heads, count = group * kv_heads, batch * rows
    arguments: dict[str, Any] = {
        "q": torch.zeros(count, heads, head_dim, dtype=dtype),
        "k_cache": torch.zeros(9, kv_heads, block, head_dim, dtype=dtype),
        "v_cache": torch.zeros(9, kv_heads, block, head_dim, dtype=dtype),
        "block_table": torch.zeros(batch, 40, dtype=torch.int32),
        "slots": torch.zeros(batch, dtype=torch.int32),
        "dense_lens": torch.zeros(batch, dtype=torch.int32),
        "row_live": torch.ones(count, dtype=torch.uint8),
        "row_masks": torch.ones(batch, rows, dtype=torch.int64),
        "out": torch.zeros(count, heads * head_dim, dtype=dtype),
        "scale": head_dim**-0.5,
        "workspace": workspace,
    }
    return attention(**(arguments | (change or {})))


def test_the_grid_does_not_depend_on_the_lengths() -> None:
    longer = call(change={"dense_lens": torch.full((2,), 1000, dtype=torch.int32)})
    assert [made.grid for made in call()] == [made.grid for made in longer]
    assert call()[0].grid == (264, 1, 1)
    assert call(change={"num_blocks": 96})[0].grid == (96, 1, 1)


def test_buckets_share_a_kernel() -> None:
    """The same machine code for all numbers of slots and, where one tile of query rows is enough, of rows."""
    assert call(batch=1, rows=3)[0].kernel is call(batch=4, rows=4)[0].kernel
    assert call(batch=1, rows=1)[0].kernel is call(batch=4, rows=2)[0].kernel
    assert call(rows=2)[0].kernel is not call(rows=3)[0].kernel, "eight query rows have no second half of a tile"
    assert call(rows=2)[1].kernel is call(rows=3)[1].kernel
    assert call(rows=4, head_dim=64)[0].kernel is not call(rows=5, head_dim=64)[0].kernel
    assert call(change={"window": 8})[0].kernel is not call()[0].kernel
    assert call(change={"keep_first": 3})[0].kernel is call()[0].kernel  # without a window it means nothing


def test_the_workspace_grows_with_the_capacity_and_not_under_a_window() -> None:
    def parts(window: int | None, blocks: int) -> int:
        made: list[torch.Size] = []

        def keep(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            made.append(torch.Size(shape))
            return torch.zeros(shape, dtype=dtype)

        call(change={"workspace": keep, "window": window, "block_table": torch.zeros(2, blocks, dtype=torch.int32)})
        return max((shape.numel() for shape in made), default=0)

    one_split = 2 * 2 * 16 * 128  # slots, heads, rows and columns
    assert parts(None, 4096 // 32) >= 16 * one_split
    assert parts(None, 8192 // 32) >= 32 * one_split
    assert 0 < parts(600, 4096 // 32) == parts(600, 8192 // 32) < 8 * one_split
    assert parts(100, 8192 // 32) == 0, "a short window is one block's"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 96}, "head size"),
        ({"block": 48}, "block must be"),
        ({"block": 8}, "block must be"),
        ({"rows": 65}, "rows a slot"),
        ({"batch": 33, "rows": 1}, "slots"),
        ({"batch": 16, "rows": 64}, "rows of all slots"),
        ({"dtype": torch.float32}, "bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call(**sizes)


def test_bytes_count_what_is_visible() -> None:
    assert attention_bytes([8192], kv_heads=8, head_dim=128) == 8192 * 8 * 128 * 4
    assert attention_bytes([8192, 100], kv_heads=8, head_dim=64, window=128) == 228 * 8 * 64 * 4
    assert attention_bytes([1000], kv_heads=1, head_dim=64, first=1, window=100, keep_first=7) == 107 * 64 * 4
    assert attention_bytes([50], kv_heads=1, head_dim=64, window=100, keep_first=7) == 50 * 64 * 4
    assert math.isclose(attention_bytes([16384] * 4, kv_heads=8, head_dim=128) / 1e6, 268.435456)
