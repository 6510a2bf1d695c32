"""Many steps of one long context, over and over: what must hold for each, and the same tokens in every pass."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bench.lib.case import Case
from bench.lib.model import ROOM
from lowlat.engine.mailbox.failed_checks import FailedCheck
from lowlat.kernels.reference.step.checks import CODE

__all__ = ["Soaked", "check_state", "soak"]

CHECKED = 64  # steps between looks at the state
OF_ALL_RANKS = ("tokens", "lengths", "active", "num_drafts", "block_table")


class Soaked(Protocol):
    """A step that can be replayed, on one GPU or several."""

    case: Case

    def replay(self) -> None:
        """Launch one step; do not wait for it."""

    def reset(self) -> None:
        """Put every slot's length back to the case's context."""

    def looks(self) -> Sequence[tuple[Mapping[str, torch.Tensor], torch.Tensor]]:
        """Wait for all steps; gives each rank's state, and for each row whether it is dead or has finite logits."""

    def close(self) -> None:
        """Release everything."""


def soak(
    make: Callable[[], Soaked],
    num_steps: int,
    progress: Callable[[dict[str, Any]], None] = lambda row: None,
    *,
    limit_s: float = math.inf,
) -> dict[str, Any]:
    """Run `num_steps` steps from the case's context on, and go back to it whenever the room after it is used up.

    Where acceptance is real, drafts of the pass before are verified in the next one, and may not change a token; where
    it is imposed, the step's reset must bring back the drafts, too.
    Returns the steps and passes that were run, tokens a step, seconds to make the step and to run it, and the problems
    found, at most ten.

    progress  called after each pass with the same figures of the run so far
    limit_s   begin no pass after so many seconds
    """
    start = time.perf_counter()
    step = make()
    ready = time.perf_counter()
    case, problems = step.case, list[str]()
    done = passes = committed = 0
    first: torch.Tensor | None = None
    row: dict[str, Any] = {}
    try:
        while done < num_steps and len(problems) < 10 and time.perf_counter() - start < limit_s:
            step.reset()
            count = min(num_steps - done, (ROOM - 2 * case.rows) // case.rows)
            for number in range(1, count + 1):
                step.replay()
                if number % CHECKED == 0 or number == count:
                    looks = step.looks()
                    problems += _problems(looks, case, number)
            done, passes = done + count, passes + 1
            state, _ = looks[0]
            tokens, lengths = state["tokens"], state["lengths"].tolist()
            committed += sum(length - case.context for length in lengths)
            known = tokens[:, case.context : min(lengths)].cpu().clone()
            if first is not None:
                common = min(first.shape[1], known.shape[1])
                if not torch.equal(first[:, :common], known[:, :common]):
                    problems.append(f"pass {passes} gave other tokens than the passes before")
            if first is None or known.shape[1] > first.shape[1]:
                first = known
            row = {"steps": done, "passes": passes, "tokens_a_step": round(committed / done / case.batch, 3)}
            row |= {"made_in_s": round(ready - start, 1), "run_in_s": round(time.perf_counter() - ready, 1)}
            row["problems"] = problems[:10]
            progress(row)
    finally:
        step.close()
    return row


def _problems(looks: Sequence[tuple[Mapping[str, torch.Tensor], torch.Tensor]], case: Case, steps: int) -> list[str]:
    """Problems of each rank, and between them."""
    problems, (first, _) = [], looks[0]
    for rank, (state, sound) in enumerate(looks):
        of = f"rank {rank}: " if rank else ""
        problems += [of + problem for problem in check_state(state, sound, case, steps)]
        if rank:
            names = [name for name in OF_ALL_RANKS if not torch.equal(state[name].cpu(), first[name].cpu())]
            problems += [f"{of}{name} differs from the first rank's after {steps} steps" for name in names]
    return problems


def check_state(state: Mapping[str, torch.Tensor], sound: torch.Tensor, case: Case, steps: int) -> list[str]:
    """Problems after so many steps from the case's context on; `sound` tells of rows: dead, or finite logits."""
    problems = []
    rows, context = case.rows, case.context
    for slot, length in enumerate(state["lengths"].tolist()):
        if not context + steps <= length <= context + steps * rows:
            problems.append(f"slot {slot} has {length} tokens {steps} steps after {context}")
    if not bool((state["active"] == 1).all()):
        problems.append(f"a slot has ended after {steps} steps: {state['active'].tolist()}")
    accepted = state["num_drafts"].tolist()
    if any(not 0 <= count <= rows - 1 for count in accepted):
        problems.append(f"{accepted} drafts after {steps} steps, {rows - 1} at most")
    if not bool(sound.all()):
        problems.append(f"logits are not finite after {steps} steps")
    if "ring_checks" in state:  # which holds as many steps as lie between looks
        failed = state["ring_checks"].flatten(0, -2)
        told = {FailedCheck.of(-1, row) for row in failed[failed[:, CODE] != 0].tolist()}
        problems += [f"a check failed within {steps} steps: {failure.describe()}" for failure in sorted(told)]
    return problems
