"""This module runs several ranks of a target on one device: every operation of all ranks in turn, and all-reduces.

It says what ranks on devices of their own must give, bit for bit. Ranks read the first one's commands, and the host
reads what the first one publishes; all else each has for itself.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from lowlat.checkpoint.source import streamed
from lowlat.errors import ConfigError
from lowlat.executors.block_moves import BlockMover, ContentMover
from lowlat.executors.distributed.rank_moves import RankMover
from lowlat.executors.reference.executor import Bound, ReferenceExecutor
from lowlat.executors.residence.base import Residence
from lowlat.graphs import Bucket, BufferSet, BufferSpec, Role
from lowlat.graphs.program import Program
from lowlat.kernels.reference.collectives.ranks import all_reduce_parts
from lowlat.models.geometry import ModelConfig
from lowlat.models.rank_weights import cut_stream

__all__ = ["RankedReferenceExecutor", "cut_weights"]

ALL_REDUCE = "gather_ranks"
Programs = Mapping[Bucket, Program]
Prefills = Mapping[int, Program]


class RankedReferenceExecutor(ReferenceExecutor):
    """The first rank, which runs the others' operations next to its own; see `lowlat.executors.Executor`.

    ranks    of each rank, in order: the step's programs, and those of prefill; alike but for extents and biases
    weights  canonical weights, whole: read once, and each rank keeps its part
    configs  the geometry of each rank
    residence where all ranks' weights and paged state lie, see `ReferenceExecutor`
    A hook sees the first rank's arguments. Raises ConfigError for programs that are not alike.
    """

    def __init__(
        self,
        ranks: Sequence[tuple[Programs, Prefills]],
        weights: Mapping[str, torch.Tensor],
        configs: Sequence[ModelConfig],
        device: torch.device,
        *,
        hooks: bool = True,
        residence: Residence | None = None,
    ) -> None:
        parts = cut_weights(weights, configs, device)
        every = [program for own in ranks[0] for program in own.values()]
        specs = [spec for each in every for spec in each.specs(Role.COMMAND, Role.STATE) if _is_the_hosts(spec)]
        specs.sort(key=lambda spec: spec.num_bytes)
        commands = BufferSet({spec.name: spec for spec in specs}.values(), device)  # of each name the largest
        super().__init__(*ranks[0], parts[0], device, hooks=hooks, given=commands, residence=residence)
        self._peers = [
            ReferenceExecutor(*own, part, device, given=commands, residence=residence)
            for own, part in zip(ranks[1:], parts[1:], strict=True)
        ]

    def peer_state(self, rank: int) -> BufferSet:
        """The state of a rank, for debugging and comparison."""
        return self.state if rank == 0 else self._peers[rank - 1].state

    def _prepare(self, key: Bucket | int) -> tuple[BufferSet, tuple[Bound, ...]]:
        """The first rank's buffers, and operations of all ranks under the first one's arguments."""
        known = self._prepared.get(key)
        if known is None:
            own, first = super()._prepare(key)
            others = [peer._prepare(key)[1] for peer in self._peers]
            together = tuple(_together(bound) for bound in zip(first, *others, strict=True))
            known = self._prepared[key] = own, together
        return known

    @cached_property
    def mover(self) -> ContentMover:
        """The copies of blocks of all ranks together."""
        return RankMover(self.movers)

    @cached_property
    def movers(self) -> tuple[BlockMover, ...]:
        """Of each rank."""
        return *super().movers, *(mover for peer in self._peers for mover in peer.movers)

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write into the state of every rank."""
        super().write_state(values)
        for peer in self._peers:
            peer.write_state(values)

    @torch.inference_mode()
    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool, of every rank."""
        super().clear_blocks(blocks, pool)
        for peer in self._peers:
            peer.clear_blocks(blocks, pool)

    def close(self) -> None:
        """Drop every reference to programs, buffers and weights of all ranks."""
        for peer in self._peers:
            peer.close()
        super().close()


def _is_the_hosts(spec: BufferSpec) -> bool:
    """Whether the host writes a buffer, and no operation."""
    return spec.role is Role.COMMAND or spec.name == "draft_length_costs"


def _together(ranks: Sequence[Bound]) -> Bound:
    """One operation of all ranks as one of the first. Raises ConfigError for operations of two kinds."""
    op, function, arguments = ranks[0]
    for rank, (other, _, _) in enumerate(ranks):
        if other.kind != op.kind:
            raise ConfigError(f"rank {rank} runs {other.kind} where rank 0 runs {op.kind}: programs of ranks differ")
    run: Callable[..., None]
    if op.kind == ALL_REDUCE:
        parts: Any = [own["x"] for _, _, own in ranks]
        outs: Any = [own["out"] for _, _, own in ranks]

        def run(**_: object) -> None:
            all_reduce_parts(parts, outs)

    else:
        others = [(each, own) for _, each, own in ranks[1:]]

        def run(**given: object) -> None:
            function(**given)
            for each, own in others:
                each(**own)

    return op, run, arguments


def cut_weights(
    weights: Mapping[str, torch.Tensor], configs: Sequence[ModelConfig], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Each rank's weights, the files read once; ranks share one tensor of an uncut weight, in float32 on a CPU."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in configs]
    with streamed(weights, torch.device("cpu")) as stream:
        for names, parts in cut_stream(stream, configs):
            first = parts[0]
            whole = first is not None and all(part is first for part in parts)
            if first is not None and whole and device.type == "cpu" and first.is_floating_point():
                parts = (first.float(),) * len(parts)
            for rank, part in zip(found, parts, strict=True):
                if part is not None:
                    rank.update(dict.fromkeys(names, part))
    return found
