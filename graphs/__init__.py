"""Buckets, static buffers, launches, and the capture of CUDA graphs. It knows nothing about models."""

from lowlat.graphs.buckets import Bucket, BucketLadder
from lowlat.graphs.buffers import BufferSet, BufferSpec, Paging, Role, aligned_bytes

__all__ = ["Bucket", "BucketLadder", "BufferSet", "BufferSpec", "Paging", "Role", "aligned_bytes"]
