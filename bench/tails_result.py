"""The schema of `bench.tails`' file: cases, their rows, and histograms that percentiles can be taken of again."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from bench.clock import percentile
from lowlat.tools.bench.results import Environment

__all__ = ["Case", "Histogram", "Setup", "Tails", "TailsFile"]

PER_OCTAVE = 512  # a value is off by at most 0.07 %


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The driver of the steps, whether the device repeats them by itself, and what else the host does.

    through  "process": `Runtime.step`; "socket": a client of a server in another process; "device": nobody, steps are
             queued one behind the other, and what is measured is the device's own time
    host     "busy": as many processes spin as are asked for, by default one a core; "threads": two threads of this
             process spin
    """

    through: Literal["process", "socket", "device"]
    device_loop: bool
    host: Literal["idle", "busy", "threads"]

    @property
    def name(self) -> str:
        """For instance `process, loops, idle`."""
        return f"{self.through}, {'loops' if self.device_loop else 'steps'}, {self.host}"


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values by magnitude: [k, count] of values around 2 ** (k / per_octave), ascending."""

    per_octave: int
    buckets: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Histogram":
        """The histogram of positive values."""
        counts = Counter(round(PER_OCTAVE * math.log2(value)) for value in values)
        return cls(per_octave=PER_OCTAVE, buckets=tuple(sorted(counts.items())))

    def percentile(self, percent: float) -> float:
        """The value that so many percent of all do not exceed, as near as the buckets tell."""
        wanted, below = math.ceil(sum(count for _, count in self.buckets) * percent / 100), 0
        for magnitude, count in self.buckets:
            below += count
            if below >= wanted:
                return float(2.0 ** (magnitude / self.per_octave))
        return 0.0


class Tails(msgspec.Struct, frozen=True, kw_only=True):
    """One case, measured; us.

    num_steps     timed; the first ones behind a first token are not among them, nor are prefills
    num_left_out  steps that were run and not timed
    num_arrivals  times at which one step or several together came; the percentiles are of the times between two
    mean_us       of a step: all the time over all steps
    own_us        the device's own mean time of a step over the same positions, from the case "device"; None without it
    host_share    how much longer than that the mean step is, as a part of it
    limit_s       seconds that the case was given; None: as many as it took
    """

    case: Case
    num_steps: int
    num_requests: int
    num_left_out: int
    num_arrivals: int
    mean_us: float
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    p999_over_p50: float
    own_us: float | None = None
    host_share: float | None = None
    seconds: float
    limit_s: float | None
    histogram: Histogram

    @classmethod
    def of(
        cls,
        case: Case,
        times_us: Sequence[float],
        num_steps: int,
        *,
        num_requests: int,
        num_left_out: int,
        seconds: float,
        limit_s: float | None,
    ) -> "Tails":
        """The figures of the times between arrivals."""
        p50, p99, p999 = (percentile(times_us, percent) for percent in (50, 99, 99.9))
        return cls(
            case=case,
            num_steps=num_steps,
            num_requests=num_requests,
            num_left_out=num_left_out,
            num_arrivals=len(times_us),
            mean_us=round(math.fsum(times_us) / num_steps, 3),
            p50_us=round(p50, 3),
            p99_us=round(p99, 3),
            p999_us=round(p999, 3),
            max_us=round(max(times_us), 3),
            p999_over_p50=round(p999 / p50, 5),
            seconds=round(seconds, 2),
            limit_s=limit_s,
            histogram=Histogram.of(times_us),
        )

    def beside(self, own: "Tails | None") -> "Tails":
        """This row, with the device's own time and the host's share."""
        if own is None or self.case.through == "device":
            return self
        share = round(self.mean_us / own.mean_us - 1, 5)
        return msgspec.structs.replace(self, own_us=own.mean_us, host_share=share)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of all cases.

    window    tokens that a request decodes behind a prompt of `context` tokens, which all requests share
    steps     asked for, of each case
    spinners  processes that spin where the host is busy
    """

    context: int
    window: int
    num_speculative_tokens: int
    simulated_accept_length: float | None
    steps: int
    spinners: int


class TailsFile(msgspec.Struct, kw_only=True, tag="tails", tag_field="kind"):
    """The file: conditions and rows."""

    version: int = 1
    setup: Setup
    environment: Environment
    rows: list[Tails] = []

    def row(self, case: Case) -> Tails | None:
        """A case's row, where it was measured."""
        return next((row for row in self.rows if row.case == case), None)

    def add(self, row: Tails) -> None:
        """Take a row in place of the case's last one, and set all rows beside the device's own time."""
        rows = [each for each in self.rows if each.case != row.case] + [row]
        own = {each.case.device_loop: each for each in rows if each.case.through == "device"}
        self.rows = [each.beside(own.get(each.case.device_loop)) for each in rows]
