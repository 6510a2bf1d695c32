"""This module launches the gated delta rule over a step's rows, alone or with the operations before and after it."""

from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.recurrent.delta_step import HeadSizes, StepSizes, make_step
from lowlat.kernels.recurrent.limits import KEY_DIM, TAPS, VALUE_DIM
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain.kernel import H200, HOPPER, Argument, Gpu, Kernel, KernelCall

__all__ = [
    "check_heads",
    "check_norm_weight",
    "check_taps",
    "delta_rule",
    "examples",
    "gated_delta",
    "joins_blocks",
    "snapshot_pairs",
]

MAX_ROWS = 32  # a slot


def check_heads(heads: HeadSizes) -> None:
    """Raise ShapeError unless the lanes of warps hold the heads' states."""
    if heads.key_heads < 1 or heads.value_heads % heads.key_heads:
        raise ShapeError(f"{heads.value_heads} value heads are no multiple of {heads.key_heads} key heads")
    KEY_DIM.check("Dk", heads.key_dim)
    VALUE_DIM.check("Dv", heads.value_dim)


def joins_blocks(heads: HeadSizes, gpu: Gpu) -> bool:
    """Whether the blocks of a head can share what its norm needs: there is one, or they are a cluster."""
    return heads.parts == 1 or gpu.capability >= HOPPER


def check_taps(weight: torch.Tensor, channels: int) -> None:
    """Raise ShapeError unless a convolution's weight is bf16 [channels, 4]."""
    check_shape("weight", weight, channels, TAPS)
    check_dtype(torch.bfloat16, weight=weight)


def check_norm_weight(weight: torch.Tensor, dim: int) -> bool:
    """Whether the gated norm's weight is float32. Raises ShapeError for another shape, or a dtype that is not bf16."""
    check_shape("weight", weight, dim)
    if weight.dtype != torch.float32:
        check_dtype(torch.bfloat16, weight=weight)
    return weight.dtype == torch.float32


def snapshot_pairs(snapshots: torch.Tensor | None) -> int:
    """How many rows of the states a chunk of prefill may leave besides the slot's; -1: it is told of no snapshots.

    Raises ShapeError unless they are [1, 1 + 2 pairs].
    """
    if snapshots is None:
        return -1
    check_shape("snapshots", snapshots, 1, snapshots.shape[-1])
    check_dtype(torch.int32, snapshots=snapshots)
    if snapshots.shape[1] % 2 == 0:
        raise ShapeError(f"snapshots must be a row and pairs, got {snapshots.shape[1]} numbers")
    return snapshots.shape[1] // 2


def delta_rule(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    state_lens: torch.Tensor,
    row_live: torch.Tensor,
    *,
    state: torch.Tensor,
    pending_k: torch.Tensor,
    pending_d: torch.Tensor,
    pending_g: torch.Tensor,
    out: torch.Tensor,
    early: bool = False,
) -> list[KernelCall]:
    """`delta_rule` of the reference, whose arguments these are; mixed and out are bf16, weights float32.

    early  lengths, states and pending rows are older than the kernel before
    A slot whose state cannot be that before its rows gives NaN. One launch. Time: 8 bytes a number of the states over
    the memory's bandwidth. Captured: yes. Raises ShapeError for shapes or dtypes that do not fit.
    """
    states = (state, pending_k, pending_d, pending_g)
    heads, rows = _check(ba, a_log, dt_bias, slots, dense_lens, row_live, states, out)
    check_shape("mixed", mixed, out.shape[0], heads.channels)
    check_dtype(torch.bfloat16, mixed=mixed)
    sizes = StepSizes(heads, rows, heads.channels, 0, pending_k.shape[1], None, False, early)
    lengths = (slots, dense_lens, state_lens, row_live)
    return [_call(sizes, slots.shape[0], (mixed, 0, 0, ba, a_log, dt_bias, *lengths, *states, 0, out))]


def gated_delta(
    x: torch.Tensor,
    weight: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    state_lens: torch.Tensor,
    row_live: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    pending_k: torch.Tensor,
    pending_d: torch.Tensor,
    pending_g: torch.Tensor,
    out: torch.Tensor,
    eps: float | None = None,
    early: bool = False,
) -> list[KernelCall]:
    """`delta_conv`, `delta_rule` and, with its weight and eps, `delta_norm`, whose gates are x's last columns.

    The arguments are these operations'. One launch, with their bits. Raises ShapeError as `delta_rule` does, and for
    rings that have fewer places than a step's rows need.
    """
    states = (state, pending_k, pending_d, pending_g)
    heads, rows = _check(ba, a_log, dt_bias, slots, dense_lens, row_live, states, out)
    check_shape("x", x, out.shape[0], x.shape[1])
    check_dtype(torch.float32, x=x)
    check_taps(weight, heads.channels)
    check_shape("conv_state", conv_state, *conv_state.shape[:2], heads.channels)
    check_dtype(torch.bfloat16, conv_state=conv_state)
    wide = False
    if norm_weight is not None and eps is not None:
        wide = check_norm_weight(norm_weight, heads.value_dim)
    least = heads.channels + (0 if norm_weight is None else heads.value_heads * heads.value_dim)
    if x.shape[1] < least or x.shape[1] % 4:
        raise ShapeError(f"x must have {least} columns or more, a multiple of 4, got {x.shape[1]}")
    if conv_state.shape[1] < rows + TAPS - 1:
        raise ShapeError(f"conv_state must have {rows + TAPS - 1} places a slot, got {conv_state.shape[1]}")
    sizes = StepSizes(
        heads, rows, x.shape[1], conv_state.shape[1], pending_k.shape[1], None if norm_weight is None else eps, wide,
        early,
    )  # fmt: skip
    lengths: tuple[Argument, ...] = (slots, dense_lens, state_lens, row_live)
    norm: Argument = 0 if norm_weight is None else norm_weight
    return [_call(sizes, slots.shape[0], (x, weight, conv_state, ba, a_log, dt_bias, *lengths, *states, norm, out))]


def _check(
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    row_live: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> tuple[HeadSizes, int]:
    """The heads' sizes, and the rows of a slot. Raises ShapeError."""
    state, pending_k, pending_d, pending_g = states
    (_, value_heads, value_dim, key_dim), (slot_count, places, key_heads, _) = state.shape, pending_k.shape
    heads = HeadSizes(key_heads, value_heads, key_dim, value_dim)
    check_heads(heads)
    rows = out.shape[0] // slots.shape[0]
    check_shape("pending_k", pending_k, slot_count, places, key_heads, key_dim)
    check_shape("pending_d", pending_d, slot_count, places, value_heads, value_dim)
    check_shape("pending_g", pending_g, slot_count, places, value_heads)
    check_shape("out", out, slots.shape[0] * rows, value_heads * value_dim)
    check_shape("ba", ba, out.shape[0], 2 * value_heads)
    check_shape("a_log", a_log, value_heads)
    check_shape("dt_bias", dt_bias, value_heads)
    check_shape("dense_lens", dense_lens, slots.shape[0])
    check_shape("row_live", row_live.reshape(-1), out.shape[0])
    named: dict[str, Any] = {"state": state, "pending_k": pending_k, "pending_d": pending_d, "pending_g": pending_g}
    check_dtype(torch.float32, ba=ba, a_log=a_log, dt_bias=dt_bias, **named)
    check_dtype(torch.bfloat16, out=out)
    if not 1 <= rows <= MAX_ROWS or places % 2 or not 2 * rows <= places <= 2 * MAX_ROWS:
        raise ShapeError(f"a ring of {2 * rows} to {2 * MAX_ROWS} pending rows fits {rows} rows a slot, got {places}")
    return heads, rows


def _call(sizes: StepSizes, batch: int, arguments: tuple[Argument, ...]) -> KernelCall:
    return KernelCall(make_step(sizes), (batch * sizes.heads.value_heads * sizes.heads.parts, 1, 1), arguments)


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Specialisations that CI compiles: 35B-A3B's and 27B's heads, alone and with all, four rows and one."""
    moe, dense = HeadSizes(16, 32, 128, 128), HeadSizes(16, 48, 128, 128)
    made = [
        StepSizes(moe, 4, moe.channels, 0, 16, None, False, False),
        StepSizes(moe, 1, moe.channels + 4096, 11, 16, None, False, True),
        StepSizes(HeadSizes(2, 4, 32, 32), 4, 256 + 128, 7, 8, 1e-6, False, True),
    ]
    if gpu.capability >= HOPPER:
        made += [
            StepSizes(moe, 1, moe.channels + 4096, 11, 16, 1e-6, False, True),
            StepSizes(dense, 4, dense.channels + 6144, 11, 16, 1e-6, False, True),
            StepSizes(moe, 8, moe.channels + 4096, 11, 16, 1e-6, True, False),
        ]
    return [make_step(each) for each in made]
