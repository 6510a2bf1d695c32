"""This module has the counts of an executor's launches: kernels, library calls, waits and copies."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["LaunchCounts"]


@dataclass
class LaunchCounts:
    """The launches of an executor's programs on all ranks, counted when they were lowered; its waits and copies.

    launches          launches of lowlat's kernels
    planned           of these, launches whose plan depends on the GPU: GEMMs, attention, experts
    tuned             of the planned ones, launches whose plan is in the GPU's tuning table
    untuned           kind and key of the plans that are not in the table, each once
    library_calls     calls of torch's operations; with the reference executor every operation is one
    fallbacks         of these, calls in place of a kernel of lowlat's, as `KIND in PROGRAM's STAGE`
    synchronisations  waits for all of the device's work since the load
    copies            copies between host and device since the load, except prompts
    """

    launches: int = 0
    planned: int = 0
    tuned: int = 0
    library_calls: int = 0
    untuned: tuple[tuple[str, str], ...] = ()
    fallbacks: tuple[str, ...] = ()
    synchronisations: int = 0
    copies: int = 0

    @classmethod
    def of_ranks(cls, ranks: Iterable["LaunchCounts"]) -> "LaunchCounts":
        """The counts of all ranks together."""
        every = list(ranks)
        return cls(
            launches=sum(each.launches for each in every),
            planned=sum(each.planned for each in every),
            tuned=sum(each.tuned for each in every),
            library_calls=sum(each.library_calls for each in every),
            untuned=tuple(dict.fromkeys(place for each in every for place in each.untuned)),
            fallbacks=tuple(call for each in every for call in each.fallbacks),
            synchronisations=sum(each.synchronisations for each in every),
            copies=sum(each.copies for each in every),
        )
