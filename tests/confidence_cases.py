"""Drafting that ends by confidence, against the references: rows of every kind, and steps in a row that learn."""

import random
from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import Arrays, Bench, poisoned
from selection_cases import Memory

from lowlat.kernels.reference.speculation import depths
from lowlat.kernels.reference.speculation import width_odds as odds
from lowlat.kernels.reference.speculation.depths import NUM_SURE
from lowlat.kernels.reference.speculation.draft_confidence import NUM_KINDS, draft_confidence
from lowlat.kernels.reference.speculation.width_odds import NUM_RUNS
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS, FROM_METHOD
from lowlat.kernels.speculation import confidence
from lowlat.kernels.speculation.choose_depth import choose_depth
from lowlat.kernels.toolchain.kernel import KernelCall

ENDS = (1, 2, 4)  # the drafts behind which drafting halts
CHANCES = (0.1, 0.3, 0.6, 0.8, 0.97)  # of the likeliest draft, far from every edge: of each kind one
INTS: dict[str, Any] = {"dtype": torch.int32}
ROW = 1  # of the costs
CHOSEN_BY = (
    *("slots", "lengths", "slot_ints", "width_bounds", "width_costs", "depth_costs", "width_expected"),
    *("sure_odds", "draft_kinds", "draft_expected", "draft_rates", "width_choice", "draft_further"),
)
LEARNT_FROM = (
    *("slots", "accepted_lens", "num_verified", "verified_source", "draft_kinds", "draft_ends", "draft_rates"),
    "sure_odds",
)


def sure_rows(width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a vocabulary of at least 64, and whether they are live: of each kind, extremes, broken ones, a dead one.

    The largest of a row is now its first, now its last number, now one between.
    """
    rows = torch.randn(2 * len(CHANCES) + 6, width, generator=generator) / 2
    for index, chance in enumerate((*CHANCES, *CHANCES)):
        place = (0, width - 1, width // 2)[index % 3]
        rows[index, place] = -torch.inf
        rest = rows[index].double().exp().sum()
        rows[index, place] = float((rest * chance / (1 - chance)).log())
    rows[len(CHANCES) : 2 * len(CHANCES)] += 1e3
    least = torch.finfo(torch.float32).min
    rows[-6], rows[-5] = least, least
    rows[-5, 5] = -least
    rows[-4, width - 1], rows[-3, 0], rows[-2, width // 3] = torch.nan, torch.inf, -torch.inf
    live = torch.ones(rows.shape[0], dtype=torch.uint8)
    rows[-1, 3] = 1e4
    live[-1] = 0
    return rows, live


def sure_calls(build: Callable[..., list[KernelCall]], arrays: Arrays, memory: Memory) -> list[list[KernelCall]]:
    """Two calls on arrays of `sure_arrays`, one behind the other: of rows some of which are dead, and of live ones."""
    first = build(arrays["logits"], arrays["live"], draft_kinds=arrays["kinds"], end=1, workspace=memory)
    whole = build(arrays["logits"], draft_kinds=arrays["kinds"], end=2, workspace=memory)
    return [first, whole]


def sure_arrays(width: int, seed: int) -> tuple[Arrays, torch.Tensor]:
    """The arrays of both calls, and the kinds that the reference finds."""
    logits, live = sure_rows(width, torch.Generator().manual_seed(seed))
    kinds = torch.full((logits.shape[0], 3), -77, **INTS)
    expected = kinds.clone()
    draft_confidence(logits, live, draft_kinds=expected, end=1)
    draft_confidence(logits, draft_kinds=expected, end=2)
    found = expected[:, 1].tolist()
    assert found == [*range(5), *range(5), 0, 4, 0, 0, 0, 0]
    assert expected[-1, 2] == 4 and (expected[:, 0] == -77).all()
    return {"logits": logits, "live": live, "kinds": kinds}, expected


class Depths:
    """Three slots, one of them idle, that draft by how sure they are; bounds and limits change now and then."""

    def __init__(self, seed: int) -> None:
        self.source, self.most = random.Random(seed), 5 + 2 * (seed % 2)
        most = self.most
        self.arrays: Arrays = {
            "slots": torch.tensor([2, -1, 0], **INTS),
            "lengths": torch.tensor([9, 5, 7], **INTS),
            "slot_ints": torch.zeros(3, NUM_INTS, dtype=torch.int64),
            "width_bounds": torch.tensor([0, most], **INTS),
            **self._costs(),
            "width_odds": torch.zeros(4, NUM_RUNS, most, 2, **INTS),
            "width_runs": torch.zeros(3, **INTS),
            "width_expected": torch.zeros(3, most + 1, **INTS),
            "sure_odds": torch.zeros(NUM_KINDS, most, NUM_SURE, **INTS),
            "draft_kinds": torch.zeros(3, len(ENDS), **INTS),
            "draft_ends": torch.tensor(ENDS, **INTS),
            "draft_expected": poisoned(3, most + 1),
            "draft_rates": poisoned(3, most),
            "width_choice": poisoned(1),
            "draft_further": poisoned(1),
            **{name: torch.zeros(3, **INTS) for name in ("accepted_lens", "num_verified", "verified_source")},
        }
        self.arrays["slot_ints"][:, DRAFT_LIMIT] = torch.tensor([7, 7, 2])
        self.mood = 2

    def _costs(self) -> Arrays:
        """Usual costs, and those behind each end, where what is drafted is paid for whatever is verified."""
        source, unit = self.source, 1 << 18
        verify, level = source.choice((40, 90)), source.choice((20, 60))
        usual = [1000 + (verify + level) * width for width in range(self.most + 1)]
        known = [[1000 + verify * width + level * max(width, end) for width in range(self.most + 1)] for end in ENDS]
        slopes = [300 + 11 * width for width in range(self.most + 1)]
        widths, costs = torch.ones(2, 2, self.most + 2, **INTS), torch.ones(2, 2, len(ENDS), self.most + 1, **INTS)
        widths[ROW, 0, :-1], widths[ROW, 1, :-1] = torch.tensor(usual) * unit, torch.tensor(slopes) * unit
        costs[ROW, 0], costs[ROW, 1] = torch.tensor(known) * unit, torch.tensor(slopes) * unit
        return {"width_costs": widths, "depth_costs": costs}

    def join(self, slot: int) -> None:
        """A request that begins in a slot."""
        arrays = self.arrays
        record = {name: arrays[name] for name in ("lengths", "width_odds", "width_runs", "width_expected")}
        own = {"slots": torch.tensor([slot], **INTS), "draft_live": torch.ones(1, dtype=torch.uint8)}
        odds.join_widths(**own, **record, extended=torch.zeros(3, **INTS), width_waited=torch.zeros(1, **INTS))

    def draft(self, bench: Bench) -> set[str]:
        """Draft until no more is wanted; returns what was reached."""
        arrays, reached = self.arrays, set[str]()
        for end, depth in enumerate(ENDS):
            for index in (0, 2):
                arrays["draft_kinds"][index, end] = min(max(self.mood + self.source.randint(-1, 1), 0), 4)
            given: dict[str, Any] = {"row": ROW, "end": end, "depth": depth}
            before = {name: arrays[name] for name in CHOSEN_BY}
            arrays |= bench.compare(before, _each(depths.choose_depth, **given), _each(choose_depth, **given))
            chosen, further = int(arrays["width_choice"]), bool(arrays["draft_further"])
            free = {name: tensor.clone() for name, tensor in before.items()}
            free["width_bounds"] = torch.tensor([0, self.most], **INTS)
            _each(depths.choose_depth, **given)(free)
            low, high = arrays["width_bounds"].tolist()
            reached.add(f"{'on' if further else 'stop'} at {end}")
            if chosen != int(free["width_choice"]):
                reached |= {name for name, bound in (("least bound", low), ("most bound", high)) if chosen == bound}
            if min(int(arrays["slot_ints"][slot, DRAFT_LIMIT]) for slot in (0, 2)) < chosen:
                reached.add("limit")
            if not further:
                break
        return reached

    def go_on(self) -> set[str]:
        """What becomes of the step; returns what was reached."""
        arrays, source, reached = self.arrays, self.source, set[str]()
        for index, slot in ((0, 2), (2, 0)):
            allowed, right = min(int(arrays["width_choice"]), int(arrays["slot_ints"][slot, DRAFT_LIMIT])), 0
            chance = CHANCES[int(arrays["draft_kinds"][index, 0])]
            while right < allowed and source.random() < chance:
                right += 1
            dead = source.random() < 0.05
            arrays["accepted_lens"][index], arrays["num_verified"][index] = 0 if dead else right + 1, allowed
            arrays["verified_source"][index] = source.choice((FROM_METHOD, FROM_METHOD, FROM_METHOD, FORCED_DRAFTS))
            arrays["lengths"][slot] += right + 1
            forced = int(arrays["verified_source"][index]) == FORCED_DRAFTS
            reached |= {"dead"} if dead else {"forced drafts"} if forced else {f"{right} of {allowed}"}
        if source.random() < 0.2:
            self.mood = source.randrange(NUM_KINDS)
        if source.random() < 0.3:
            low = source.choice((0, 0, 3))
            arrays["width_bounds"] = torch.tensor([low, source.choice((0, 1, self.most, self.most))], **INTS)
        if source.random() < 0.2:
            arrays["slot_ints"][:, DRAFT_LIMIT] = torch.tensor(source.choice(([7, 7, 2], [7, 7, 7], [1, 0, 3])))
        return reached


def check_depths(bench: Bench, seed: int, steps: int) -> set[str]:
    """Steps in a row: what is chosen at each end, then what is learnt; returns what was reached."""
    world, reached = Depths(seed), set[str]()
    for step in range(steps):
        if step % 16 == 0:
            for slot in (0, 2):
                world.join(slot)
        reached |= world.draft(bench) | world.go_on()
        arrays = world.arrays
        names = ("slots", "accepted_lens", "num_verified", "verified_source", "width_odds", "width_runs")
        spare = {"dense_lens": torch.zeros(3, **INTS), "extended": torch.zeros(3, **INTS)}
        odds.learn_widths(**{name: arrays[name] for name in (*names, "width_expected")}, **spare, extends=False)
        given = {name: arrays[name] for name in LEARNT_FROM}
        arrays |= bench.compare(given, _each(depths.learn_confidence), _each(confidence.learn_confidence))
    return reached


def check_nobody(bench: Bench) -> None:
    """No slot is listed: the least width, and nothing else is written."""
    arrays = Depths(0).arrays
    arrays["slots"].fill_(-1)
    for low in (0, 3):
        arrays["width_bounds"][0] = low
        for end, depth in enumerate(ENDS):
            given = {"row": ROW, "end": end, "depth": depth}
            before = {name: arrays[name] for name in CHOSEN_BY}
            found = bench.compare(before, _each(depths.choose_depth, **given), _each(choose_depth, **given))
            assert int(found["width_choice"]) == max(low, 1)
    learnt = {name: arrays[name] for name in LEARNT_FROM}
    bench.compare(learnt, _each(depths.learn_confidence), _each(confidence.learn_confidence))


def _each(function: Any, **values: Any) -> Any:
    """The function by arrays that are given later."""
    return lambda given: function(**given, **values)
