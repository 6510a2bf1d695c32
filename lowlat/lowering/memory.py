"""The memory that prefill takes on a GPU next to its buffers, counted beforehand for the memory plan.

`workspaces_of` are those that its kernels ask for, `temporary_bytes` is an upper bound of the memory that torch's
operations take while they run.
"""

import math
from collections.abc import Callable

import torch

from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.attention.partial.block_lists import scores_workspace
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.kernels.gemm.prefill.plan import MOST_ROWS
from lowlat.kernels.moe.plan import partials_workspace
from lowlat.kernels.moe.prefill.experts import PARTS_ROWS, list_workspaces, parts_workspace
from lowlat.kernels.moe.prefill.warpgroup_plan import fits_warpgroups, warpgroup_workspaces
from lowlat.kernels.moe.router import router_workspace
from lowlat.kernels.recurrent.delta_prefill import heads_of, row_workspaces
from lowlat.kernels.toolchain.kernel import WorkspaceShape
from lowlat.lowering.binding import in_parts
from lowlat.lowering.prefill_attention import FLASH_DIM, attention_workspaces, refresh_bytes
from lowlat.lowering.prefill_gemm import activation_workspace, codes_workspace, gemm_workspaces
from lowlat.lowering.weight_parts import EXPERT_GEMMS, GEMMS
from lowlat.options.runtime import FEW_SLOTS
from lowlat.options.slots import MOST_STEP_ROWS

__all__ = ["temporary_bytes", "workspace_bytes", "workspaces_of"]

ATTENTION = ("prefill_attention", "refresh_attention")
LIBRARY_BYTES = 64 << 20  # workspaces of the matrix libraries, and what the allocator rounds up
STEP_ROWS = 64  # of a launch of a step of up to FEW_SLOTS slots, at most
SUMS = 4  # float32 copies of attention's sums of weights, at most

ShapeOf = Callable[[str], torch.Size]


def workspaces_of(program: Program, shape_of: ShapeOf) -> dict[tuple[str, torch.dtype], int]:
    """The workspaces of a prefill program, and the elements that each needs; none of a program that is no prefill.

    shape_of  the shape of a weight by its canonical name; asked of the matrices of GEMMs [N, K], of experts [E, ...]
              and of routers [E, N]
    """
    most: dict[tuple[str, torch.dtype], int] = {}
    for op in program.ops:
        if op.stage is Stage.PREFILL:
            for name, shape, dtype in _workspaces(program, op, shape_of):
                most[name, dtype] = max(most.get((name, dtype), 0), math.prod(shape))
    return {key: count for key, count in most.items() if count}


def workspace_bytes(program: Program, shape_of: ShapeOf) -> int:
    """Bytes of a program's workspaces, see `workspaces_of`."""
    return sum(count * dtype.itemsize for (_, dtype), count in workspaces_of(program, shape_of).items())


def _workspaces(program: Program, op: Op, shape_of: ShapeOf) -> list[WorkspaceShape]:
    """The workspaces that an operation asks for."""
    if op.kind in GEMMS:
        rows, parts = min(program.buffers[op.writes["out"]].shape[0], MOST_ROWS), None
        if in_parts(op):
            parts = KParts(int(op.params["num_parts"] or 1), 1)
        height, width = shape_of(op.weights["weight"])
        codes = [codes_workspace(rows, width)] if op.params.get("activations") is not None else []
        return [*gemm_workspaces(rows, height, width, parts), *codes]
    if op.kind == "silu_mul":
        return [activation_workspace(*program.buffers[op.writes["out"]].shape)]
    if op.kind in ATTENTION:
        cache, size = program.buffers[op.reads["k_cache"]], program.buffers[op.reads["q"]].shape[0]
        window = op.params.get("window")
        longest = program.buffers["tokens"].shape[1]
        return attention_workspaces(cache, size, longest, window if isinstance(window, int) else None)
    if op.kind == "prefill_delta_rule":
        rows, channels = program.buffers[op.reads["mixed"]].shape
        return [*row_workspaces(heads_of(program.buffers[op.writes["state"]].shape, channels), rows)]
    if op.kind == "choose_blocks":
        return [scores_workspace(*program.buffers[op.writes["block_lists"]].shape[1:])]
    if op.kind in EXPERT_GEMMS:
        rows, top_k = program.buffers[op.reads["expert_ids"]].shape
        num_experts, width = shape_of(next(iter(op.weights.values())))[0], program.buffers[op.writes["out"]].shape[-1]
        lists = list_workspaces(rows, top_k, num_experts)
        if op.kind == "experts_gate_up":
            return [*lists]
        inner = program.buffers[op.reads["activated"]].shape[-1]
        if in_parts(op):
            parts = KParts(int(op.params["num_parts"] or 1), 1)
            rows_at_once = max(
                min(rows, PARTS_ROWS), _step_rows(program) * parts.count
            )  # steps keep each part's apart, in it, too
            partials = partials_workspace(rows_at_once, top_k, width)
            return [*lists, partials, parts_workspace(rows, width, parts)]
        if fits_warpgroups(width, inner, rows * top_k, num_experts):
            return [*lists, *warpgroup_workspaces(rows, top_k, num_experts, width, inner)]
        return [*lists, partials_workspace(rows, top_k, width)]
    if op.kind == "router":
        rows = program.buffers[op.writes["expert_ids"]].shape[0]
        return [router_workspace(rows, shape_of(op.weights["weight"])[0])]
    return []


def _step_rows(program: Program) -> int:
    """The most rows of a launch of a step of the same runtime."""
    return STEP_ROWS if program.buffers["tokens"].shape[0] <= FEW_SLOTS else MOST_STEP_ROWS


def temporary_bytes(program: Program, shape_of: ShapeOf) -> int:
    """Bytes that torch's operations take in a prefill program's largest chunk; none of a program that is no prefill.

    shape_of  the shape of a GEMM's matrix [N, K] by its canonical name
    The largest GEMM and the largest attention are added up, all else is kernels: the allocator may keep blocks of one
    size from serving another.
    """
    ops = [op for op in program.ops if op.stage is Stage.PREFILL]
    if not ops:
        return 0
    size = program.buffers["prefill_tokens"].shape[0]
    largest = {"gemm": 0, "attention": 0}
    for op in ops:
        if op.kind in GEMMS:
            kind, found = "gemm", _gemm_bytes(size, shape_of(op.weights["weight"]))
        elif op.kind in ATTENTION:
            kind, found = "attention", _attention_bytes(program, op)
        else:
            continue
        largest[kind] = max(largest[kind], found)
    return sum(largest.values()) + LIBRARY_BYTES


def _gemm_bytes(size: int, shape: torch.Size) -> int:
    """The unpacked matrix, and the output in the order of its packed rows."""
    rows, columns = shape
    padded = -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS
    return 2 * padded + 4 * size * rows


def _attention_bytes(program: Program, op: Op) -> int:
    """The result and its sums; in float32 where sinks scale it, and a second time, in both, of heads that flash
    attention does not take."""
    size, heads, dim = program.buffers[op.reads["q"]].shape
    if op.kind == "refresh_attention":
        return refresh_bytes(size, heads, dim, program.buffers["tokens"].shape[1])
    number = (6 if "sinks" in op.weights else 2) + (6 if dim > FLASH_DIM else 0)
    return number * size * heads * dim + SUMS * 4 * heads * size
