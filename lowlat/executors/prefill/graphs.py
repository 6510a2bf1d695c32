"""Capturing prefill by torch, whose operations it runs: one graph for each number of positions."""

from collections.abc import Mapping

import torch

from lowlat.executors.prefill.chunk import BoundPrefill

__all__ = ["capture_prefills"]


def capture_prefills(
    prefills: Mapping[int, BoundPrefill], stream: torch.cuda.Stream
) -> dict[int, torch.cuda.CUDAGraph]:
    """Graphs by size, replayed on the stream one at a time: they share the memory of what torch takes meanwhile.

    Each is run before, so that kernels are loaded and libraries have their workspaces, and every graph replayed once,
    which brings it to the device: what the arguments say is done; as they are allocated, all rows are dead.
    Raises RuntimeError, torch's, where the device fails.
    """
    largest_first = sorted(prefills, reverse=True)
    with torch.cuda.stream(stream):
        for size in largest_first:
            prefills[size].run()
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    for size in largest_first:
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool, stream, capture_error_mode="thread_local"):
            prefills[size].run()
    with torch.cuda.stream(stream):
        for graph in graphs.values():
            graph.replay()
    return graphs
