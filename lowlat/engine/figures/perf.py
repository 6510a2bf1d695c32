"""This module counts a runtime's launches, waits and copies, and its steps without drafts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lowlat.engine.metrics import SpeculativeDecodingStats
from lowlat.executors import LaunchCounts
from lowlat.step.ladder import StepLadder

__all__ = ["PerfCounters", "steps_by_width"]


@dataclass(frozen=True)
class PerfCounters:
    """Launches of a runtime, and its waits, copies and steps without drafts.

    launches          of our kernels, over the programs of all buckets, first tokens and prefill, and over all ranks
    planned_launches  of these, launches whose plan depends on the GPU: GEMMs, attention, experts
    tuned_launches    of these, launches by plans of the GPU's tuning table
    library_calls     calls of torch's operations in these programs; with the reference executor all operations are
    fallback_calls    of these, calls in place of a kernel of ours
    synchronisations  waits for all of the device's work since the load
    copies            between host and device since the load, without those of prompts
    undrafted_steps   slots' steps without drafts while the runtime speculates, by reason: `max_draft_tokens` (the
                      request wants none), `last_token` (one token is to come), `no_drafts` (the speculator had
                      none, or the previous step was requested without drafting), `chosen_width` (the step chose none)
    """

    launches: int = 0
    planned_launches: int = 0
    tuned_launches: int = 0
    library_calls: int = 0
    fallback_calls: int = 0
    synchronisations: int = 0
    copies: int = 0
    undrafted_steps: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: LaunchCounts, mailbox_copies: int, undrafted: Mapping[str, int]) -> "PerfCounters":
        """Make the counters' current values."""
        return cls(
            launches=counts.launches,
            planned_launches=counts.planned,
            tuned_launches=counts.tuned,
            library_calls=counts.library_calls,
            fallback_calls=len(counts.fallbacks),
            synchronisations=counts.synchronisations,
            copies=counts.copies + mailbox_copies,
            undrafted_steps=dict(undrafted),
        )

    def since(self, before: "PerfCounters") -> "PerfCounters":
        """These counters with waits, copies and steps since earlier ones of the same runtime."""
        return self._with(before, -1)

    def plus(self, other: "PerfCounters") -> "PerfCounters":
        """These counters with another's waits, copies and steps added."""
        return self._with(other, 1)

    def _with(self, other: "PerfCounters", sign: int) -> "PerfCounters":
        steps = Counter(self.undrafted_steps)
        for reason, count in other.undrafted_steps.items():
            steps[reason] += sign * count
        return replace(
            self,
            synchronisations=self.synchronisations + sign * other.synchronisations,
            copies=self.copies + sign * other.copies,
            undrafted_steps={reason: count for reason, count in steps.items() if count},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def steps_by_width(
    ladder: StepLadder, undrafted: Mapping[str, int], stats: SpeculativeDecodingStats | None
) -> dict[str, list[int]]:
    """A block `steps_by_width`: slots' steps that verified 0, 1, 2, ... drafts; {} if draft lengths are not chosen."""
    if not ladder.adaptive:
        return {}
    most = max(ladder.rows_of)
    drafted = [0] * most if stats is None else stats.drafted_by_position[:most]
    every = sum(undrafted.values()) + (0 if stats is None else stats.num_drafts)
    return {"steps_by_width": [here - deeper for here, deeper in zip([every, *drafted], [*drafted, 0], strict=True)]}
