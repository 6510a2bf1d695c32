"""This module takes weights to several GPUs: it reads every tensor once, and sends each GPU its rank's part.

It knows extents by `rank_weights` alone, and packs nothing.
"""

from collections.abc import Mapping, Sequence

import torch

from lowlat.checkpoint.source import PlacedWeights, streamed
from lowlat.models.geometry import ModelConfig
from lowlat.models.rank_weights import cut_stream

__all__ = ["place_parts"]


def place_parts(
    weights: Mapping[str, torch.Tensor], configs: Sequence[ModelConfig], devices: Sequence[torch.device]
) -> list[PlacedWeights]:
    """Each rank's weights on its own device, as the checkpoint has them.

    weights  canonical, whole
    configs  the geometry of each rank
    The host holds one tensor at a time; an executor that packs a part lets go of it. Raises ConfigError as `cut_stream`
    does.
    """
    found = [PlacedWeights() for _ in configs]
    with streamed(weights, devices[0]) as stream:
        for names, parts in cut_stream(stream, configs):
            for rank, part, device in zip(found, parts, devices, strict=True):
                if part is not None:
                    rank.add(names, part.to(device, copy=True))
    return found
