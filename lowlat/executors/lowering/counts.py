"""Counts of what lowered programs launch. It knows no operation's kernel."""

from collections.abc import Iterable

from lowlat.executors import LaunchCounts
from lowlat.executors.lowering.binding import LibraryCall
from lowlat.executors.lowering.lower import LoweredGroup
from lowlat.kernels.toolchain.kernel import Card

__all__ = ["count_launches"]

# operations whose kernels are cut by the card; all others have one shape everywhere
PLANNED = {"linear", "attention", "prefill_attention", "router", "experts_gate_up", "experts_down"}


def count_launches(programs: Iterable[tuple[str, Iterable[LoweredGroup]]], card: Card) -> LaunchCounts:
    """The counts of programs, each with its name and its lowered groups."""
    counts = LaunchCounts()
    fallbacks: list[str] = []
    for name, groups in programs:
        for group in groups:
            library = [call for call in group.calls if isinstance(call, LibraryCall)]
            launches = len(group.calls) - len(library)
            planned = launches if any(op.kind in PLANNED for op in group.ops) else 0
            counts.launches += launches
            counts.planned += planned
            counts.tuned += planned if card.is_measured else 0
            counts.library_calls += len(library)
            fallbacks += [f"{call.name} in {name}'s {group.stage}" for call in library if call.is_fallback]
    counts.fallbacks = tuple(fallbacks)
    return counts
