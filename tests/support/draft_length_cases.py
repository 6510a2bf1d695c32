"""Slots whose draft lengths are chosen at each step, and rows that wait for the draft model, against the references."""

import random
from functools import partial
from typing import Any

import torch
from kernel_cases import Arrays, Bench, poisoned

from lowlat.kernels.reference.speculation import draft_lengths, waiting
from lowlat.kernels.reference.speculation import length_probabilities as probabilities
from lowlat.kernels.reference.speculation.draft_rows import draft_rows
from lowlat.kernels.reference.speculation.length_probabilities import NUM_RUNS
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS, FROM_METHOD
from lowlat.kernels.speculation import length_probabilities as probabilities_kernels
from lowlat.kernels.speculation import waiting as waiting_kernels
from lowlat.kernels.speculation.choose_draft_length import choose_draft_length
from lowlat.kernels.toolchain.kernel import KernelCall

MOST = 5
INTS: dict[str, Any] = {"dtype": torch.int32}
RECORD = ("extended", "length_probabilities", "length_runs", "length_expected")
CHOSEN_BY = (*("active", "lengths", "extended", "slot_ints", "length_bounds", "draft_length_costs", "length_expected"),)
LEARNT_FROM = ("slots", "accepted_lens", "num_verified", "verified_source", "dense_lens")
WAITED = (
    *("slots", "lengths", "tokens", "extended"),
    *("waiting_tokens", "counts", "firsts", "draft_live", "draft_lens"),
)
DRAFT_ROWS = ("row_tokens", "row_positions", "row_live", "write_lens", "live_positions")


class Widths:
    """Three slots, one of them idle, each of acceptance probabilities of its own; the host's bounds change now and
    then.
    """

    def __init__(self, seed: int, most_waiting: int) -> None:
        self.source, self.most_waiting = random.Random(seed), most_waiting
        costs = [100, 130, 140, 150, 160, 170, 104] if seed % 2 else [100, 150, 180, 220, 270, 320, 130]
        base, slope = ([cost * unit for cost in costs] for unit in (1 << 20, 1 << 16))
        self.arrays: Arrays = {
            "active": torch.tensor([1, 0, 1], **INTS),
            "lengths": torch.tensor([9, 5, 7], **INTS),
            "extended": torch.zeros(3, **INTS),
            "slot_ints": torch.zeros(3, NUM_INTS, dtype=torch.int64),
            "length_bounds": torch.tensor([0, MOST], **INTS),
            "draft_length_costs": torch.tensor([[[1] * 7] * 2, [base, slope]], **INTS),
            "length_probabilities": torch.zeros(4, NUM_RUNS, MOST, 2, **INTS),
            "length_runs": torch.zeros(3, **INTS),
            "length_expected": torch.zeros(3, MOST + 1, **INTS),
            "length_last": torch.zeros(1, **INTS),
            "length_waited": torch.zeros(1, **INTS),
            "draft_length_choice": poisoned(1),
            "slots": torch.tensor([2, -1, 0], **INTS),
            **{
                name: torch.zeros(3, **INTS)
                for name in ("accepted_lens", "num_verified", "verified_source", "dense_lens")
            },
        }
        self.arrays["slot_ints"][:, DRAFT_LIMIT] = torch.tensor([7, 7, 2])
        self.rates = [0.9, 0.0, 0.6] if seed % 2 else [0.1, 0.0, 0.5]

    def join(self, slot: int) -> Arrays:
        """The arrays of `join_lengths` for a slot."""
        own = {"slots": torch.tensor([slot], **INTS), "draft_live": torch.ones(1, dtype=torch.uint8)}
        return {**own, **{name: self.arrays[name] for name in ("lengths", *RECORD, "length_waited")}}

    def go_on(self) -> int:
        """Run a step of the length that was chosen; returns the choice."""
        arrays, choice = self.arrays, int(self.arrays["draft_length_choice"])
        length = choice if choice <= MOST else 0
        for index, slot in ((0, 2), (2, 0)):
            allowed, right = min(length, int(arrays["slot_ints"][slot, DRAFT_LIMIT])), 0
            while right < allowed and self.source.random() < self.rates[slot]:
                right += 1
            arrays["dense_lens"][index] = arrays["lengths"][slot] - 1
            arrays["accepted_lens"][index], arrays["num_verified"][index] = right + 1, allowed
            arrays["verified_source"][index] = self.source.choice((FROM_METHOD, FROM_METHOD, FORCED_DRAFTS))
            arrays["lengths"][slot] += right + 1
        if self.source.random() < 0.02:
            self.rates.reverse()
        if self.source.random() < 0.1:
            low = self.source.choice((0, 0, 2))
            arrays["length_bounds"] = torch.tensor([low, self.source.choice((0, 1, MOST))], **INTS)
        return choice


def check_lengths(bench: Bench, seed: int, most_waiting: int, steps: int = 24) -> set[int]:
    """Steps in a row: what is chosen, then what is learnt; returns what was chosen."""
    world = Widths(seed, most_waiting)
    given: dict[str, Any] = {"row": 1, "most_waiting": most_waiting}
    chosen = set()
    for step in range(steps):
        if step % 16 == 0:
            for slot in (0, 2):
                joined = bench.compare(
                    world.join(slot), _each(probabilities.join_lengths), _each(probabilities_kernels.join_lengths)
                )
                world.arrays |= {name: joined[name] for name in (*RECORD, "length_waited")}
        arrays = {
            name: world.arrays[name] for name in (*CHOSEN_BY, "length_last", "length_waited", "draft_length_choice")
        }
        world.arrays |= bench.compare(
            arrays, _each(draft_lengths.choose_draft_length, **given), _each(choose_draft_length, **given)
        )
        choice = world.go_on()
        extends = bool(choice)
        arrays = {name: world.arrays[name] for name in (*LEARNT_FROM, *RECORD)}
        learns = (_each(part.learn_draft_lengths, extends=extends) for part in (probabilities, probabilities_kernels))
        world.arrays |= bench.compare(arrays, *learns)
        chosen.add(choice)
    return chosen


def check_waiting(bench: Bench, seed: int) -> None:
    """Features of a step's rows are kept, its rows laid out with those that waited before, and their features taken."""
    generator, source = torch.Generator().manual_seed(seed), random.Random(seed)
    kept, taken, rows, sources, width = 8, 4 + 4 * (seed % 2), 3, 1 + seed % 7, 8
    counts = [source.randint(0, rows) for _ in range(3)]
    first = [source.randint(0, 20) for _ in range(3)]
    slots = torch.tensor([2, 0, -1, 3], **INTS)
    arrays: Arrays = {
        "accepted_nodes": torch.tensor([[source.randrange(rows) for _ in range(rows)] for _ in range(4)], **INTS),
        "commit_lens": torch.tensor([*counts, 0], **INTS),
        "dense_lens": torch.tensor([*first, 0], **INTS),
        "slots": slots,
        **{f"source{k}": torch.randn(4 * rows, width, generator=generator) for k in range(sources)},
        "waiting_features": torch.randn(5, kept, sources * width, generator=generator),
    }
    done = bench.compare(arrays, partial(_call, waiting.keep_features), partial(_call, waiting_kernels.keep_features))
    lengths = torch.tensor([source.randint(2, 30) for _ in range(5)], **INTS)
    rows_of: Arrays = {
        "slots": slots,
        "lengths": lengths,
        "tokens": torch.arange(5 * 40, **INTS).reshape(5, 40),
        "extended": torch.tensor([max(0, int(each) - 1 - source.randint(1, 6)) for each in lengths], **INTS),
        "waiting_tokens": poisoned(4, taken),
        **{name: poisoned(4) for name in ("counts", "firsts", "draft_lens")},
        "draft_live": torch.full((4,), 9, dtype=torch.uint8),
    }
    laid = bench.compare(rows_of, partial(_call, waiting.waiting_rows), partial(_call, waiting_kernels.waiting_rows))
    features = {name: laid[name] for name in ("slots", "firsts", "counts")}
    features |= {"waiting_features": done["waiting_features"], "out": torch.full((4 * taken, sources * width), 9.0)}
    bench.compare(features, partial(_call, waiting.take_features), partial(_call, waiting_kernels.take_features))
    together = {**rows_of, **features, **{name: poisoned(4, taken) for name in DRAFT_ROWS[:2]}}
    together |= {"row_live": poisoned(4, taken, dtype=torch.uint8), "write_lens": poisoned(4)}
    together |= {"live_positions": poisoned(4, 1), **{name: poisoned(4) for name in ("counts", "firsts")}}
    bench.compare(together, _reference_rows, _rows_at_once)


def _reference_rows(found: Arrays) -> None:
    waiting.waiting_rows(**{name: found[name] for name in WAITED})
    names = ("waiting_features", "slots", "firsts", "counts", "out")
    waiting.take_features(**{name: found[name] for name in names})
    given = {"accepted_tokens": "waiting_tokens", "commit_lens": "counts", "dense_lens": "firsts"}
    given |= {"draft_live": "draft_live", "tokens": "row_tokens", "positions": "row_positions"}
    given |= {name: name for name in DRAFT_ROWS[2:]}
    draft_rows(**{argument: found[name] for argument, name in given.items()})


def _rows_at_once(found: Arrays) -> list[KernelCall]:
    renamed = {"row_tokens": "tokens", "row_positions": "positions"}
    return waiting_kernels.draft_waiting_rows(
        features={name: found[name] for name in ("waiting_features", "out")},
        rows={renamed.get(name, name): found[name] for name in DRAFT_ROWS},
        **{name: found[name] for name in WAITED},
    )


def _call(function: Any, given: Arrays, **values: Any) -> Any:
    return function(**given, **values)


def _each(function: Any, **values: Any) -> Any:
    """The function by arrays that are given later."""
    return partial(_call, function, **values)
