"""This module stores drafts with their masks and paths in state, for the kernels of a step's end and start.

Its device functions are run by a whole block, which synchronises between loads and stores. Arrays are passed as
addresses.
"""

from typing import Any

from lowlat.kernels.common.memory import byte_at, divide, int_at, long_at, set_int, set_long, turns
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64

__all__ = ["hand_over", "load_drafts", "load_going", "write_drafts", "write_paths"]


@device_function
def load_going(thread: Any, batch: Any, slots: Any, draft_live: Any, going: Any) -> None:
    """The slots that will verify these drafts; -1 where there is none."""
    if thread < batch:
        slot, live = int_at(slots, thread), byte_at(draft_live, thread)
        going[thread] = slot if live != 0 else int64(-1)


@device_function
def load_drafts(thread: Any, threads: Any, extents: Any, source: Any, drafted: Any, ends: Any) -> None:
    """The drafted nodes, and no end of any slot's drafts yet.

    extents  slots, rows, and a slot's nodes in `source`, of which the first are these
    """
    batch, rows, nodes = extents
    for turn in range(turns(batch * rows, threads)):
        place = thread + turn * threads
        if place < batch * rows:
            if nodes == rows:
                drafted[place] = int_at(source, place)
            else:
                index, row = divide(place, rows)
                drafted[place] = int_at(source, index * nodes + row)
    if thread < batch:
        ends[thread] = rows


@device_function
def write_drafts(thread: Any, threads: Any, sizes: Any, going: Any, drafted: Any, ends: Any, addresses: Any) -> None:
    """The next step's drafts and masks; the first failed draft of each slot, in `ends`."""
    batch, rows, max_rows = sizes
    topology_masks, drafts, tree_masks = addresses
    for turn in range(turns(batch * rows, threads)):
        place = thread + turn * threads
        if place < batch * rows:
            index, row = divide(place, rows)
            slot, node = int64(going[index]), int64(drafted[place])
            if slot >= 0:
                mask = long_at(topology_masks, row)
                set_int(drafts, slot * max_rows + row, node)
                set_long(tree_masks, slot * max_rows + row, mask)
                if row > 0 and node < 0:
                    cuda.atomic.min(ends, index, int32(row))


@device_function
def write_paths(thread: Any, threads: Any, batch: Any, sizes: Any, going: Any, source: Any, target: Any) -> None:
    """The next step's paths; -1 past the topology's."""
    num_paths, width, known_paths, known_length = sizes
    for turn in range(turns(batch * num_paths * width, threads)):
        place = thread + turn * threads
        if place < batch * num_paths * width:
            index, cell = divide(place, num_paths * width)
            path, column = divide(cell, width)
            node = int64(-1)
            slot = int64(going[index])
            if slot >= 0:
                if path < known_paths and column < known_length:
                    node = int_at(source, path * known_length + column)
                set_int(target, slot * num_paths * width + cell, node)


@device_function
def hand_over(thread: Any, threads: Any, sizes: Any, path_sizes: Any, sources: Any, targets: Any, shared: Any) -> None:
    """All of it by one block, which meets after it.

    sizes, path_sizes  batch, rows, the state's rows and the drafted nodes; the extents of the state's paths and of the
                       topology's
    shared             drafted nodes, slots that go on, and ends of drafts
    """
    batch, rows, max_rows, nodes = sizes
    slots, draft_live, draft_nodes, topology_masks, topology_paths = sources
    drafts, tree_masks, tree_paths, num_drafts = targets
    drafted, going, ends = shared
    load_going(thread, batch, slots, draft_live, going)
    load_drafts(thread, threads, (batch, rows, nodes), draft_nodes, drafted, ends)
    cuda.syncthreads()
    written = (topology_masks, drafts, tree_masks)
    write_drafts(thread, threads, (batch, rows, max_rows), going, drafted, ends, written)
    write_paths(thread, threads, batch, path_sizes, going, topology_paths, tree_paths)
    cuda.syncthreads()
    if thread < batch and going[thread] >= 0:
        set_int(num_drafts, int64(going[thread]), int64(ends[thread]) - 1)
    cuda.syncthreads()
