"""Many steps of one long context, over and over: what must hold for each, and the same tokens in every pass."""

import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpt_oss_cases import OssCase, OssModel
from bench.gpt_oss_step import OssStep, Weights
from bench.lowlat_step import ROOM

__all__ = ["check_state", "soak"]

CHECKED = 64  # steps between looks at the state


def soak(
    model: OssModel,
    case: OssCase,
    weights: Weights,
    device: torch.device,
    num_steps: int,
    progress: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Run `num_steps` steps from the case's context on, back to it whenever the room behind is used up.

    Acceptance is real: drafts of the pass before are verified in the next one, and may not change a token. Returns the
    steps and passes that were run, tokens a step, seconds to make the step and to run it, and the problems found, at
    most ten.

    progress  is given the same of what was run so far, after each pass
    """
    start = time.perf_counter()
    step = OssStep(model, case, weights, device, simulated=None)
    ready = time.perf_counter()
    problems: list[str] = []
    done = passes = committed = 0
    first: torch.Tensor | None = None
    row: dict[str, Any] = {}
    try:
        while done < num_steps and len(problems) < 10:
            step.reset()
            count = min(num_steps - done, (ROOM - 2 * case.step.rows) // case.step.rows)
            for number in range(1, count + 1):
                step.replay()
                if number % CHECKED == 0 or number == count:
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    scratch = step.executor.scratch(step.bucket)
                    sound = (scratch["finite"] != 0) | (scratch["row_live"] == 0)
                    problems += check_state(step.executor.state, sound, case, number)
            done, passes = done + count, passes + 1
            tokens, lengths = step.executor.state["tokens"], step.executor.state["lengths"].tolist()
            committed += sum(length - case.step.context for length in lengths)
            known = tokens[:, case.step.context : min(lengths)].cpu().clone()
            if first is not None:
                common = min(first.shape[1], known.shape[1])
                if not torch.equal(first[:, :common], known[:, :common]):
                    problems.append(f"pass {passes} gave other tokens than the passes before")
            if first is None or known.shape[1] > first.shape[1]:
                first = known
            row = {"steps": done, "passes": passes, "tokens_a_step": round(committed / done, 3)}
            row |= {"made_in_s": round(ready - start, 1), "run_in_s": round(time.perf_counter() - ready, 1)}
            row["problems"] = problems[:10]
            progress(row)
    finally:
        step.close()
    return row


def check_state(state: Any, sound: torch.Tensor, case: OssCase, steps: int) -> list[str]:
    """Problems after so many steps from the case's context on; `sound` tells of rows: dead, or finite logits."""
    problems = []
    rows, context = case.step.rows, case.step.context
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
    return problems
