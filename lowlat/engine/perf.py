"""Performance counters of a runtime, and the checks of `perf_mode="strict"`.

Strict mode refuses, each in its place: debugging (`RuntimeConfig`), a draft model that cannot be used (`load`), torch's
operations in place of kernels and plans that no tuning table has (`check_device`, `check_launches`),
sampling and requests without drafts (`RequestChecks`), a step at another depth (`Runtime.step`), a step's result that
does not add up and drafts that fail to come (`StepChecks`).

Two things need no check: a step's shapes are those of its bucket, and a size without a bucket is refused in every mode.
A captured step holds kernels alone, as the audit of its capture says, and the host reads its publications from pinned
memory; the counters of waits and copies are of what is done between steps. A loop on the device begins with a fill of
its budget, eight bytes, which neither waits nor copies and is not counted. Masks are made on the device, from a tree
that was checked when it was read. A library's attention in prefill, where no kernel of ours takes it, is never refused.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lowlat.engine.mailbox import SlotPublication
from lowlat.engine.metrics import SpeculativeDecodingStats
from lowlat.engine.request import Request
from lowlat.errors import ConfigError, DeviceError
from lowlat.executors import LaunchCounts
from lowlat.executors.devices import DeviceChoice
from lowlat.options.declaration import options_of
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.step.ladder import StepLadder

__all__ = [
    "PerfCounters",
    "PublishedSteps",
    "StepChecks",
    "check_device",
    "check_launches",
    "steps_by_width",
    "tune_command",
]

# options that say which launches there are; other sizes `lowlat tune` has all by itself
TUNED_BY = (
    *("quantize", "quantize_lm_head", "kv_cache_dtype", "tensor_parallel_size", "tp_invariant", "prefill_chunk"),
    *("max_prefill_chunks", "activations"),
)
DRAFTS_TUNED_BY = ("draft_quantize", "draft_tensor_parallel_size")
MOST_NAMED = 3  # launches in a message
REQUEST_LIMIT, LAST_TOKEN, NO_DRAFTS, CHOSEN = "max_draft_tokens", "last_token", "no_drafts", "chosen_width"


@dataclass(frozen=True)
class PerfCounters:
    """Launches of a runtime, and its waits, copies and steps without drafts.

    launches          of our kernels, over the programs of all buckets, first tokens and prefill, and over all ranks
    planned_launches  of these, launches whose plan depends on the GPU: GEMMs, attention, experts
    tuned_launches    of these, launches by plans of the GPU's tuning table
    library_calls     calls of torch's operations in these programs; with the reference executor all operations are
    fallback_calls    of these, calls in place of a kernel of ours
    synchronisations  waits for all of the device's work since the load
    copies            between host and device since the load, prompts' excepted
    undrafted_steps   a slot's steps without drafts where the runtime speculates, by reason: `max_draft_tokens` (the
                      request wants none), `last_token` (there is room for one token), `no_drafts` (the speculator had
                      none, or the step before was asked for without), `chosen_width` (the step chose none)
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
        """The counters as they stand now."""
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


def _reason_for_no_drafts(max_draft_tokens: int | None, room: int, *, adaptive: bool) -> str:
    """Why a step verified no draft: the request's limit, or no room for any next to the token of the step itself."""
    if max_draft_tokens == 0:
        return REQUEST_LIMIT
    if room <= 1:
        return LAST_TOKEN
    return CHOSEN if adaptive else NO_DRAFTS


def steps_by_width(
    ladder: StepLadder, undrafted: Mapping[str, int], stats: SpeculativeDecodingStats | None
) -> dict[str, list[int]]:
    """Steps of slots that verified 0, 1, 2, ... drafts, under their name; nothing where lengths are not chosen."""
    if not ladder.adaptive:
        return {}
    most = max(ladder.rows_of)
    drafted = [0] * most if stats is None else stats.drafted_by_position[:most]
    every = sum(undrafted.values()) + (0 if stats is None else stats.num_drafts)
    return {"steps_by_width": [here - deeper for here, deeper in zip([every, *drafted], [*drafted, 0], strict=True)]}


def check_device(config: RuntimeConfig, choice: DeviceChoice) -> None:
    """Raise ConfigError where strict mode would run torch's operations that nobody has asked for by name."""
    if config.is_strict and not choice.has_kernels and config.executor != "reference":
        raise ConfigError(
            f"perf_mode 'strict' runs kernels, and this runtime would run torch's operations ({choice.reason}); "
            f"a test may ask for them by name: executor 'reference'"
        )


def tune_command(config: RuntimeConfig, speculative: SpeculativeConfig | None = None) -> str:
    """The command that measures the plans which a runtime of these options lacks.

    speculative  None: there is no draft model
    """
    words = ["lowlat tune all --model DIR"]
    if speculative is not None and speculative.model is not None:
        words.append("--draft-model DIR")
    at_once = min(config.max_prefill_chunks, -(-config.max_context // config.prefill_chunk))
    words += _flags(replace(config, max_prefill_chunks=at_once), TUNED_BY)
    words += [] if speculative is None else _flags(speculative, DRAFTS_TUNED_BY)
    return " ".join([*words, "--missing"])


def _flags(record: RuntimeConfig | SpeculativeConfig, names: tuple[str, ...]) -> list[str]:
    """The flags of options that are not as they are by default."""
    found, options = list[str](), type(record)
    for option in options_of(options):  # type: ignore[arg-type]
        value = getattr(record, option.name)
        if option.name in names and value != option.default:
            found.append(option.flag if value is True else f"{option.flag} {value}")
    return found


def check_launches(config: RuntimeConfig, counts: LaunchCounts, speculative: SpeculativeConfig | None = None) -> None:
    """Raise ConfigError where strict mode would launch what was not tuned, or a library in place of a kernel.

    counts       of all ranks: each one's launches need entries, as parts of a target need not be alike
    speculative  None: there is no draft model
    """
    if not config.is_strict:
        return
    if counts.fallbacks:
        raise ConfigError(
            f"perf_mode 'strict' runs kernels, and torch stands in for kernels in {len(counts.fallbacks)} calls, the "
            f"first {counts.fallbacks[0]}: no kernel takes such sizes, or weights of 8 and 4 bits, on this "
            "GPU; perf_mode 'default' goes on so"
        )
    if counts.tuned < counts.planned:
        raise ConfigError(
            f"perf_mode 'strict' launches by measured plans, and {counts.planned - counts.tuned} of {counts.planned} "
            f"launches have plans that were derived for this GPU: {_named(counts.untuned)}; "
            f"`{tune_command(config, speculative)}` measures them; perf_mode 'default' goes on with what was derived"
        )


def _named(untuned: tuple[tuple[str, str], ...]) -> str:
    """The first launches without an entry, and how many more there are."""
    shown = [f"{kind} {key}" for kind, key in untuned[:MOST_NAMED]]
    more = len(untuned) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


class StepChecks:
    """Checks what a step publishes for a slot, in strict mode.

    max_drafts   draft tokens that a step can verify, at most
    vocab_size   token ids are below it
    must_draft   every step has drafts, but a slot's last: of a draft model, not of text alone
    """

    def __init__(self, max_drafts: int, vocab_size: int, *, must_draft: bool) -> None:
        self._max_drafts, self._vocab_size, self._must_draft = max_drafts, vocab_size, must_draft

    def check(self, publication: SlotPublication, num_committed: int, *, first: bool, room: int) -> None:
        """Raise DeviceError where it does not add up, or has no drafts though there was room for some.

        num_committed  tokens of prompt and completion before the step
        first          it is a prompt's first token, which verifies nothing
        room           tokens that the request may still get
        """
        tokens, p = publication.token_ids, publication
        problem = None
        if not 0 <= p.accepted <= p.verified_depth <= p.verified <= self._max_drafts:
            problem = (
                f"accepted {p.accepted} of {p.verified} drafts, {p.verified_depth} deep, "
                f"and {self._max_drafts} can be verified"
            )
        elif len(tokens) > min(p.accepted + 1, room):
            problem = f"gave {len(tokens)} tokens, having accepted {p.accepted} and room for {room}"
        elif p.length != num_committed + len(tokens):
            problem = f"ended at length {p.length}, and {num_committed} and {len(tokens)} tokens were committed"
        elif any(not 0 <= token < self._vocab_size for token in tokens):
            problem = f"gave tokens {list(tokens)}, of a vocabulary of {self._vocab_size}"
        elif self._must_draft and not first and p.verified == 0 and room > 1:
            problem = f"verified no draft with room for {room} tokens"
        if problem is not None:
            raise DeviceError(f"perf_mode 'strict': a step of slot {p.slot} {problem}")


class ActiveSlots:
    """Counts the slots that decode steps brought tokens: the fewest, the mean and the most of a step."""

    def __init__(self) -> None:
        self.num_steps = self.total = self.most = 0
        self.fewest: int | None = None

    def count(self, active: int) -> None:
        """Count a step of so many active slots, one at least."""
        self.num_steps += 1
        self.total += active
        if active > self.most:
            self.most = active
        if self.fewest is None or active < self.fewest:
            self.fewest = active

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; nothing but the number of steps where there was none."""
        if not self.num_steps:
            return {"steps": 0}
        mean = round(self.total / self.num_steps, 4)
        return {"steps": self.num_steps, "min": self.fewest, "mean": mean, "max": self.most}


class PublishedSteps:
    """Looks at every publication of a slot: `undrafted` counts those without drafts, by reason; `active` the slots.

    checks       of strict mode; None: none are made
    adaptive     steps choose their draft length
    speculating  whether drafts are expected: it may change between requests
    """

    def __init__(self, checks: StepChecks | None, *, adaptive: bool = False, speculating: bool = False) -> None:
        self.undrafted: Counter[str] = Counter()
        self.speculating = speculating
        self.active = ActiveSlots()
        self._adaptive = adaptive
        self._checks = checks

    def told(self) -> str:
        """Return the active slots, and why speculation was off, as a line for a log."""
        active = self.active
        mean = active.total / max(active.num_steps, 1)
        line = f"{active.num_steps} steps, {active.fewest} to {active.most} active slots, {mean:.2f} on average"
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.undrafted.items()))
        return f"{line}; slots without drafts: {reasons}" if reasons else line

    def report(self) -> dict[str, Any]:
        """Return, as JSON, the active slots of a step, and the steps of slots whose speculation was off, by reason."""
        disabled = {"disabled_slots": dict(self.undrafted)} if self.speculating else {}
        return {"active_slots": self.active.to_dict(), **disabled}

    def see(self, request: Request, publication: SlotPublication) -> None:
        """Count and check one publication, before its request takes it. Raises DeviceError in strict mode."""
        if self.speculating and request.has_begun and not publication.verified:
            limit = request.params.max_draft_tokens
            self.undrafted[_reason_for_no_drafts(limit, request.room, adaptive=self._adaptive)] += 1
        if self._checks is not None:
            begun, room = request.has_begun, request.room
            self._checks.check(publication, len(request.committed), first=not begun, room=room)
