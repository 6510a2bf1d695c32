"""Attention layers keep keys and values in blocks of a pool; a rewind of a slot only sets back its length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.models.decoder import cache_names
from lowlat.models.geometry import Decoder, ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.models.windows import window_suffix
from lowlat.sequence.state import SequenceState

__all__ = ["PagedKV", "cache_specs", "decoder_cache_specs", "kv_dtype"]


def kv_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype of KV caches: the compute dtype, or uint8 for e4m3 codes."""
    return TORCH_DTYPES[config.dtype] if config.coded_kv is None else torch.uint8


def cache_specs(
    names: Sequence[str],
    extents: tuple[int, int, int],
    dtype: torch.dtype,
    pools: tuple[int, Mapping[int, int]],
    window: int | None = None,
) -> list[BufferSpec]:
    """Caches of keys or of values of one layer, or of layers of one window, [P, G, block, D].

    extents  G, block, D
    pools    P, and for each window that has a pool of its own that pool's; windows without one are in the first
    """
    num_blocks, windows = pools
    own = window is not None and window in windows
    pool = window_suffix(window) if window is not None and own else ""
    shape = (windows[window] if window is not None and own else num_blocks, *extents)
    return [BufferSpec(name, shape, dtype, Role.STATE, Paging.POSITIONS, pool) for name in names]


def decoder_cache_specs(
    config: Decoder, block_size: int, dtype: torch.dtype, pools: tuple[int, Mapping[int, int]], owner: str = ""
) -> list[BufferSpec]:
    """The caches of all layers of a decoder that keep keys and values of their own.

    pools  see `cache_specs`
    owner  begins their names
    """
    return [
        cache
        for layer, spec in config.caching.items()
        for cache in cache_specs(
            cache_names(layer, owner), (spec.num_kv_heads, block_size, spec.head_dim), dtype, pools, spec.window
        )
    ]


@dataclass(frozen=True)
class PagedKV(SequenceState):
    """The target's KV cache: for each layer with attention k and v, [P, G, block, D] in the compute dtype, or codes.

    num_blocks  P, the null block included
    block_size  positions of a block
    windows     P of the pool of each window that has one; the layers of the window share it, and its tables
    """

    config: ModelConfig
    num_blocks: int
    block_size: int
    windows: Mapping[int, int]

    def specs(self) -> list[BufferSpec]:
        """`k_cache.LAYER` and `v_cache.LAYER`."""
        dtype, pools = kv_dtype(self.config), (self.num_blocks, self.windows)
        return decoder_cache_specs(self.config, self.block_size, dtype, pools)
