"""Pairs of runs: lowlat and another engine, one right after the other, first in one order and then in the other.

Each run is a process that nothing else was loaded into. A pair's ratio is of its own two runs, so that what drifts on
the machine (clocks, heat, neighbours) weighs on both; turning the order round takes out what the first of two has. The
median over pairs stands with a 95 % interval, by a bootstrap over pairs: steps of one process are no independent
samples.
"""

from collections.abc import Iterator, Sequence

import torch

from bench.peers.engine import Job
from bench.peers.results import Comparison, Estimate, PeerRow
from lowlat.tools.bench.scenarios import Case
from lowlat.tools.bootstrap import bootstrap

__all__ = ["OWN", "compared", "estimate", "schedule"]

OWN = "lowlat"
FIGURES = ("ms_per_step", "ms_per_token", "first_token_ms")


def schedule(jobs: Sequence[Job], pairs: int) -> Iterator[tuple[Job, str, int]]:
    """The runs of all cases in order: a job, the other engine of its pair, and the pair's number.

    jobs  of every case and engine; engines that lowlat is not compared with, as lowlat alone, run `pairs` times
    """
    for case in dict.fromkeys(job.case for job in jobs):
        asked = {job.engine: job for job in jobs if job.case == case}
        own = asked.pop(OWN, None)
        if own is None or not asked:
            alone = list(asked.values()) if own is None else [own]
            yield from ((job, "", number) for number in range(pairs) for job in alone)
            continue
        for name, other in asked.items():
            for number in range(pairs):
                pair = [(own, name, number), (other, OWN, number)]
                yield from reversed(pair) if number % 2 else pair


def estimate(values: Sequence[float]) -> Estimate:
    """The median of values, one a pair, and its interval."""
    numbers = torch.tensor(values, dtype=torch.float64)
    lower, upper = bootstrap(len(values), lambda drawn: _median(numbers[drawn]))
    median = float(_median(numbers[None])[0])
    return Estimate(median=round(median, 5), lower=round(lower, 5), upper=round(upper, 5))


def _median(values: torch.Tensor) -> torch.Tensor:
    """Medians of rows; of an even number the mean of the middle two."""
    return torch.quantile(values, 0.5, dim=1)


def compared(rows: Sequence[PeerRow], without: Sequence[tuple[str, Case, str]] = ()) -> list[Comparison]:
    """What whole pairs say, of each case, engine and figure.

    without  engine, case and figure that cannot be compared
    """
    found = []
    places = {(row.engine, row.case, row.against, row.pair): row for row in rows}
    names = dict.fromkeys((row.case, row.engine) for row in rows if row.against == OWN)
    for case, name in names:
        others = [row for row in rows if (row.case, row.engine, row.against) == (case, name, OWN)]
        pairs = [(places.get((OWN, case, name, row.pair)), row) for row in others]
        whole = [(own, other) for own, other in pairs if own is not None]
        for figure in FIGURES:
            medians = [(_p50(own, figure), _p50(other, figure)) for own, other in whole]
            known = [(mine, theirs) for mine, theirs in medians if mine is not None and theirs is not None]
            if not known or (name, case, figure) in without:
                continue
            found.append(
                Comparison(
                    case=case,
                    engine=name,
                    versions={OWN: whole[0][0].version, name: whole[0][1].version},
                    figure=figure,
                    pairs=len(known),
                    lowlat=estimate([mine for mine, _ in known]),
                    other=estimate([theirs for _, theirs in known]),
                    ratio=estimate([theirs / mine for mine, theirs in known]),
                )
            )
    return found


def _p50(row: PeerRow, figure: str) -> float | None:
    spread = getattr(row, figure)
    return None if spread is None else float(spread.p50)
