"""Capturing chunks of prefill by torch, whose operations they run: one graph for each reach."""

from collections.abc import Sequence

import torch

from lowlat.executors.prefill.chunk import TorchPrefill

__all__ = ["capture_chunks"]


def capture_chunks(
    prefill: TorchPrefill, reaches: Sequence[int], stream: torch.cuda.Stream
) -> dict[int, torch.cuda.CUDAGraph]:
    """Graphs by reach, replayed on the stream one at a time: they share the memory of what a chunk takes meanwhile.

    Every reach is run before, so that kernels are loaded and libraries have their workspaces, and every graph replayed
    once, which brings it to the device: what the arguments say is done; as they are allocated, all rows are dead.
    Raises RuntimeError, torch's, where the device fails.
    """
    largest_first = sorted(reaches, reverse=True)
    with torch.cuda.stream(stream):
        for reach in largest_first:
            prefill.run(reach)
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    for reach in largest_first:
        graphs[reach] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[reach], pool, stream, capture_error_mode="thread_local"):
            prefill.run(reach)
    with torch.cuda.stream(stream):
        for graph in graphs.values():
            graph.replay()
    return graphs
