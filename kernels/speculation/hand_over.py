"""This module stores a dynamic tree for the next step, with masks and paths; a thread walks from a node to the root."""

from functools import cache
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, int_at, set_int, set_long, turns
from lowlat.kernels.reference.speculation import hand_over as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, int32, int64, types

__all__ = ["examples", "hand_over_tree"]

THREADS = 64  # a node each


@launches(reference.hand_over_tree)
def hand_over_tree(given: Given) -> list[KernelCall]:
    """`hand_over_tree` of the reference. Raises ShapeError for a tree of too many nodes."""
    batch, rows, max_rows, *paths = given.sizes("B", "T", "max_T", "P", "W")
    if rows > min(max_rows, THREADS):
        raise ShapeError(f"a tree of {rows} nodes does not fit {max_rows} rows, at most {THREADS}")
    return [KernelCall(_make(rows, max_rows, *paths), (batch, 1, 1), given.tensors)]


@cache
def _make(rows: int, max_rows: int, paths: int, width: int) -> Kernel:
    """A block a slot: grid (B,)."""

    def kernel(
        draft_nodes: Any,
        draft_parents: Any,
        draft_live: Any,
        slots: Any,
        drafts: Any,
        num_drafts: Any,
        tree_masks: Any,
        tree_paths: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        parents = cuda.shared.array(shape=rows, dtype=int32)
        inner = cuda.shared.array(shape=rows, dtype=int32)
        tokens = cuda.shared.array(shape=rows, dtype=int32)
        index, node = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        slot, live = int_at(slots, index), byte_at(draft_live, index)
        if slot < 0 or live == 0:
            return
        if node < rows:
            token = int_at(draft_nodes, index * rows + node)
            tokens[node] = int32(token)
            parents[node] = int32(int_at(draft_parents, index * rows + node))
            inner[node] = 0
            set_int(drafts, slot * max_rows + node, token)
        for turn in range(turns(paths * width, THREADS)):
            place = node + turn * THREADS
            if place < paths * width:
                set_int(tree_paths, slot * (paths * width) + place, int64(-1))
        cuda.syncthreads()
        known = int64(1)
        while known < rows and tokens[known] >= 0:
            known += 1
        if node > 0 and node < known:
            inner[parents[node]] = 1
        if node == 0:
            set_int(num_drafts, slot, known - 1)
        cuda.syncthreads()
        if node < rows:
            mask, depth, above = int64(0), int64(-1), node
            while node < known and above >= 0:
                mask |= int64(1) << above
                depth += 1
                above = int64(parents[above]) if above > 0 else int64(-1)
            set_long(tree_masks, slot * max_rows + node, mask)
            path = int64(0)
            for other in range(rows):
                if other < node and inner[other] == 0:
                    path += 1
            if node < known and inner[node] == 0 and path < paths and depth < width:
                above = node
                while depth >= 0:
                    set_int(tree_paths, (slot * paths + path) * width + depth, above)
                    above = int64(parents[above]) if above > 0 else int64(0)
                    depth -= 1

    return Kernel(f"hand_over_tree_{rows}_{max_rows}_{paths}_{width}", kernel, (types.int64,) * 8, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile."""
    return [_make(32, 32, 28, 8)]
