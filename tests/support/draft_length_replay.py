"""The choice of draft lengths replayed by the reference on texts that say where drafts are right, by times of steps."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from lowlat.kernels.reference.speculation.draft_lengths import choose_draft_length
from lowlat.kernels.reference.speculation.length_probabilities import (
    MAX_LENGTH,
    NUM_RUNS,
    join_lengths,
    learn_draft_lengths,
)
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.step.draft_length_costs import StepCosts, cost_table
from lowlat.step.variants import choice_bucket

__all__ = ["Replay", "imposed", "speeds", "tokens_per_us"]

WAITING = 64  # positions that wait for the draft model, at most
INTS: dict[str, Any] = {"dtype": torch.int32}


class Replay:
    """A slot whose draft lengths the reference chooses, on texts that say at each position how many drafts are right.

    times  us that steps take; known: those by which lengths are chosen
    """

    def __init__(self, times: Sequence[float], known: Sequence[float] | None = None) -> None:
        self.times = times
        bucket = choice_bucket(1, MAX_LENGTH)
        costs = {bucket: StepCosts(times if known is None else known, [0.0] * len(times))}
        ints = torch.zeros(1, NUM_INTS, dtype=torch.int64)
        ints[0, DRAFT_LIMIT] = MAX_LENGTH
        self._record: dict[str, Any] = {
            "extended": torch.zeros(1, **INTS),
            "length_probabilities": torch.zeros(2, NUM_RUNS, MAX_LENGTH, 2, **INTS),
            "length_runs": torch.zeros(1, **INTS),
            "length_expected": torch.zeros(1, MAX_LENGTH + 1, **INTS),
        }
        self._policy = {
            name: torch.zeros(1, **INTS) for name in ("length_last", "length_waited", "draft_length_choice")
        }
        self._chosen_by = {
            "slot_ints": ints,
            "draft_length_costs": cost_table((1, 2, MAX_LENGTH + 2), costs, 1024, WAITING),
        }
        self._chosen_by |= {"length_bounds": torch.tensor([0, MAX_LENGTH], **INTS), "active": torch.ones(1, **INTS)}
        self._slots = torch.zeros(1, **INTS)

    def run(self, text: Sequence[int]) -> tuple[int, float]:
        """Tokens and us of a request; what is learnt stays for the next one."""
        place, spent, length = 0, 0.0, torch.tensor([100], **INTS)
        live = torch.ones(1, dtype=torch.uint8)
        join_lengths(self._slots, length, live, **self._record, length_waited=self._policy["length_waited"])
        while place < len(text):
            given = {name: self._record[name] for name in ("extended", "length_expected")}
            choose_draft_length(lengths=length, **self._chosen_by, **given, **self._policy, row=0, most_waiting=WAITING)
            body = int(self._policy["draft_length_choice"])
            drafts = min(body if body <= MAX_LENGTH else 0, len(text) - place - 1)
            right = min(text[place], drafts)
            told = (torch.tensor([value], **INTS) for value in (right + 1, drafts, int(drafts > 0), int(length) - 1))
            learn_draft_lengths(self._slots, *told, **self._record, extends=body > 0)
            spent += self.times[body]
            place, length = place + right + 1, length + right + 1
        return place, spent


def tokens_per_us(texts: Sequence[Sequence[int]], step_us: float, length: int) -> float:
    """The speed of one fixed length on texts."""
    tokens = steps = 0
    for text in texts:
        place = 0
        while place < len(text):
            place, steps = place + 1 + min(text[place], length, len(text) - place - 1), steps + 1
        tokens += place
    return tokens / (steps * step_us)


def imposed(mean: float, seed: int, length: int = 600) -> list[list[int]]:
    """Two texts where the same number of drafts is right everywhere, or by a coin one more."""
    source = random.Random(seed)
    return [[int(mean - 1) + (source.random() < mean % 1) for _ in range(length)] for _ in range(2)]


def speeds(replay: Replay, texts: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Tokens a us of chosen lengths and of each fixed one."""
    parts = [replay.run(text) for text in texts]
    chosen = sum(tokens for tokens, _ in parts) / sum(spent for _, spent in parts)
    return chosen, [tokens_per_us(texts, us, length) for length, us in enumerate(replay.times[: MAX_LENGTH + 1])]
