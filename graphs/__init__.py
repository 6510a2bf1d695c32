"""The step as data: Programs, buckets, static buffers, launches; their capture into CUDA graphs, audit and replay."""

from lowlat.graphs.buckets import Bucket, BucketLadder
from lowlat.graphs.buffers import BufferSet, BufferSpec, Paging, Role, aligned_bytes

__all__ = ["Bucket", "BucketLadder", "BufferSet", "BufferSpec", "Paging", "Role", "aligned_bytes"]
