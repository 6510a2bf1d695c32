"""This module declares the KV cache: attention layers keep keys and values in blocks. A slot rewinds by its length."""

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
    """Return the dtype of KV caches: the compute dtype, or uint8 for codes."""
    return TORCH_DTYPES[config.dtype] if config.coded_kv is None else torch.uint8


def cache_specs(
    names: Sequence[str],
    extents: tuple[int, int, int],
    dtype: torch.dtype,
    pools: tuple[int, Mapping[int, int]],
    window: int | None = None,
) -> list[BufferSpec]:
    """Return the specs of caches with these names, [P, G, block, D], all of layers with the same window.

    extents  G, block, D
    pools    P of the first pool, and P by window for those with a pool of their own; other windows use the first
    """
    num_blocks, windows = pools
    own = window is not None and window in windows
    pool = window_suffix(window) if window is not None and own else ""
    shape = (windows[window] if window is not None and own else num_blocks, *extents)
    return [BufferSpec(name, shape, dtype, Role.STATE, Paging.POSITIONS, pool) for name in names]


def decoder_cache_specs(
    config: Decoder, block_size: int, dtype: torch.dtype, pools: tuple[int, Mapping[int, int]], owner: str = ""
) -> list[BufferSpec]:
    """Return the caches of all layers of a decoder that keep keys and values of their own.

    pools  see `cache_specs`
    owner  the prefix of their names
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
    """The target's KV cache: K and V of each attention layer, [P, G, block, D] in the compute dtype, or as codes.

    num_blocks  P of the first pool, the null block included
    block_size  positions of a block
    windows     P by window, for windows with a pool; the layers of a window share its pool and tables
    """

    config: ModelConfig
    num_blocks: int
    block_size: int
    windows: Mapping[int, int]

    def specs(self) -> list[BufferSpec]:
        """Return `k_cache.LAYER` and `v_cache.LAYER`."""
        dtype, pools = kv_dtype(self.config), (self.num_blocks, self.windows)
        return decoder_cache_specs(self.config, self.block_size, dtype, pools)
