"""Capturing a chunk of prefill by torch, whose operations it runs."""

import torch

from lowlat.executors.prefill.chunk import TorchPrefill

__all__ = ["capture_chunk"]


def capture_chunk(prefill: TorchPrefill, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of a chunk, for all starts, to be replayed on the stream; what it takes meanwhile is its own memory.

    The chunk is run before, so that kernels are loaded and libraries have their workspaces, and the graph replayed
    once, which brings it to the device: what the arguments say is done; as they are allocated, all rows are dead.
    Raises RuntimeError, torch's, where the device fails.
    """
    with torch.cuda.stream(stream):
        prefill.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        prefill.run()
    with torch.cuda.stream(stream):
        graph.replay()
    return graph
