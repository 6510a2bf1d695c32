"""This module copies weights to several GPUs: it reads every tensor once, and sends each GPU its rank's part.

`lowlat.models.rank_weights` decides the parts. Nothing is packed here.
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
    """Place each rank's part of the weights on its own device, unpacked.

    weights  canonical, whole
    configs  the geometry of each rank
    The host holds one tensor at a time. An executor drops a part once it has packed it. Raises ConfigError as
    `cut_stream` does.
    """
    found = [PlacedWeights() for _ in configs]
    with streamed(weights, devices[0]) as stream:
        for names, parts in cut_stream(stream, configs):
            for rank, part, device in zip(found, parts, devices, strict=True):
                if part is not None:
                    rank.add(names, part.to(device, copy=True))
    return found
