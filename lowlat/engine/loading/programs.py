"""This module makes the buckets of a runtime, and a rank's programs for each."""

from collections.abc import Mapping

from lowlat.executors.make import Rank
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.tree.dynamic import Topology
from lowlat.step.adaptive import build_adaptive
from lowlat.step.decode import build_step
from lowlat.step.ladder import StepLadder
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry

__all__ = ["bucket_batches", "build_program", "build_rank", "make_ladder"]


def bucket_batches(max_batch: int) -> list[int]:
    """The batch sizes of buckets: powers of two below `max_batch`, and `max_batch` itself."""
    return sorted({1 << power for power in range(max_batch.bit_length()) if 1 << power < max_batch} | {max_batch})


def make_ladder(
    geometry: StepGeometry, topologies: Mapping[int, Topology], speculative: SpeculativeConfig | None
) -> StepLadder:
    """Make the buckets of a runtime."""
    longer = 0 if geometry.speculator is None else geometry.speculator.longer_draft_length
    rows_of = {depth: topology.num_nodes for depth, topology in topologies.items() if depth != longer or not depth}
    adaptive, speculator, partial = geometry.max_draft_length is not None, geometry.speculator, geometry.partial
    length = 0 if speculative is None or speculator is None else speculative.num_speculative_tokens
    must_fit = partial is not None and partial.lossless
    wide = (partial.buffer + 1,) if partial is not None and must_fit else geometry.forced_rows
    return StepLadder(
        bucket_batches(geometry.max_batch), rows_of, adaptive=adaptive, wide=(wide, length), must_fit=must_fit,
        proposed=() if speculator is None else speculator.wide_rows, longer=longer,
    )  # fmt: skip


def build_rank(geometry: StepGeometry, ladder: StepLadder, topologies: Mapping[int, Topology]) -> Rank:
    """Build the programs of a rank."""
    programs = {bucket: build_program(geometry, bucket, topologies) for bucket in ladder.programs}
    return Rank(geometry.config, programs, build_prefills(geometry))


def build_program(geometry: StepGeometry, bucket: Bucket, topologies: Mapping[int, Topology]) -> Program:
    """Build the program of one bucket."""
    if geometry.max_draft_length is not None:
        return build_adaptive(geometry, bucket)
    return build_step(geometry, bucket, topologies[bucket.num_speculative_tokens])
