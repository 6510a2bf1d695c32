"""This module counts the launches of lowered programs."""

from collections.abc import Iterable

from lowlat.lowering.binding import LibraryCall
from lowlat.lowering.launch_counts import LaunchCounts
from lowlat.lowering.lower import LoweredGroup

__all__ = ["count_launches"]


def count_launches(programs: Iterable[tuple[str, Iterable[LoweredGroup]]]) -> LaunchCounts:
    """The counts of programs, each with its name and its lowered groups."""
    counts = LaunchCounts()
    fallbacks: list[str] = []
    untuned: dict[tuple[str, str], None] = {}
    for name, groups in programs:
        for group in groups:
            library = [call for call in group.calls if isinstance(call, LibraryCall)]
            planned = [call.planned for call in group.kernel_calls if call.planned is not None]
            counts.launches += len(group.calls) - len(library)
            counts.planned += len(planned)
            counts.tuned += sum(each.is_tuned for each in planned)
            untuned |= dict.fromkeys((each.kind, each.key) for each in planned if not each.is_tuned)
            counts.library_calls += len(library)
            fallbacks += [f"{call.name} in {name}'s {group.stage}" for call in library if call.is_fallback]
    counts.fallbacks, counts.untuned = tuple(fallbacks), tuple(untuned)
    return counts
