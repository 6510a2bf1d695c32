"""This package represents the step as data (Programs, buckets, static buffers) and captures it into CUDA graphs."""

from lowlat.graphs.buckets import Bucket, BucketLadder
from lowlat.graphs.buffers import BufferSet, BufferSpec, Paging, Role, aligned_bytes

__all__ = ["Bucket", "BucketLadder", "BufferSet", "BufferSpec", "Paging", "Role", "aligned_bytes"]
