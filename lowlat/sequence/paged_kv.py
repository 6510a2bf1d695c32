"""Keys and values of attention layers, in blocks of a pool: rewinding a slot is setting back its length."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.sequence.state import SequenceState

__all__ = ["PagedKV", "cache_specs", "kv_dtype"]


def kv_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype of KV caches: the compute dtype, or uint8 for codes."""
    return TORCH_DTYPES[config.dtype] if config.coded_kv is None else torch.uint8


def cache_specs(names: Sequence[str], shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[BufferSpec]:
    """Caches of keys or of values of one shape, [P, G, block, D]."""
    return [BufferSpec(name, shape, dtype, Role.STATE, Paging.POSITIONS) for name in names]


@dataclass(frozen=True)
class PagedKV(SequenceState):
    """The target's KV cache: for each layer with attention k and v, [P, G, block, D] in the compute dtype, or codes.

    num_blocks  P, the null block included
    block_size  positions of a block
    """

    config: ModelConfig
    num_blocks: int
    block_size: int

    def specs(self) -> list[BufferSpec]:
        """`k_cache.LAYER` and `v_cache.LAYER`."""
        return [
            cache
            for layer, spec in self.config.attentions.items()
            for cache in cache_specs(
                (f"k_cache.{layer}", f"v_cache.{layer}"),
                (self.num_blocks, spec.num_kv_heads, self.block_size, spec.head_dim),
                kv_dtype(self.config),
            )
        ]
