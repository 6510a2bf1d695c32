"""This module checks capture boundaries: it measures the acceptance of first drafts with boundaries shifted by one.

An error of one layer is this field's commonest silent failure: the draft model works, but few drafts are accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowlat.checkpoint.files import read_json, read_text
from lowlat.cli.running import chat_ids, load_runtime
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError, LowlatError
from lowlat.models.target import read_model_config
from lowlat.options.limits import LimitCheck
from lowlat.options.method_options import AUTO_METHOD
from lowlat.options.request import SamplingParams
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.methods import plan_speculator, settled

__all__ = ["SHIFTS", "ShiftResult", "measure_shifts", "read_prompts", "unshifted_is_best"]

SHIFTS = (-1, 0, 1)
MAX_PROMPT_FILE = 16 << 20
BATCH = 4
Prompt = str | list[int]


@dataclass(frozen=True)
class ShiftResult:
    """First-position acceptance with every boundary shifted; `drafted` is None where no boundary could move."""

    shift: int
    boundaries: tuple[int, ...]
    drafted: int | None
    accepted: int

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted first tokens."""
        return self.accepted / self.drafted if self.drafted else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "shift": self.shift,
            "capture_boundaries": list(self.boundaries),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "first_position_acceptance": self.acceptance,
        }


def read_prompts(path: Path, limit: int) -> list[Prompt]:
    """The first prompts of a file, taken in turn from its domains.

    A .json file holds a list of prompts, or lists by domain; a prompt is a text or a list of token ids. Any other
    file holds a prompt a line. Raises ConfigError.
    """
    if path.suffix == ".json":
        found: Any = read_json(path, MAX_PROMPT_FILE)
    else:
        found = [line for line in read_text(path, MAX_PROMPT_FILE).splitlines() if line.strip()]
    groups = list(found.values()) if isinstance(found, dict) else [found]
    if not groups or not all(isinstance(group, list) and group for group in groups):
        raise ConfigError(f"{path}: expected a list of prompts, or such lists by domain, none of them empty")
    longest = max(len(group) for group in groups)
    prompts = [group[place] for place in range(longest) for group in groups if place < len(group)]
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, list)):
            raise ConfigError(f"{path}: prompt {place} must be text or a list of ids, got {type(prompt).__name__}")
    return prompts[:limit]


def measure_shifts(
    target: Path,
    head: Path | None,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    chat: bool,
    **options: Any,
) -> tuple[list[ShiftResult], list[LimitCheck]]:
    """Decode the prompts greedily, one draft a step, once for each shift of the draft model's capture boundaries.

    head  the draft model; None: the one in the target's own files
    Boundaries stay between 0 and the target's layers; a shift that this undoes is not run. Also returns the default
    configuration of this draft model compared with the loaded engine. Raises ConfigError and RequestError.
    """
    config = read_model_config(target)
    own_options = settled(SpeculativeConfig(model=head, method=AUTO_METHOD, num_speculative_tokens=1), target)
    draft = plan_speculator(own_options, config, target).draft_config
    own = () if draft is None else draft.capture_boundaries
    results, checks = [], list[LimitCheck]()
    for shift in SHIFTS:
        boundaries = tuple(min(max(boundary + shift, 0), config.num_layers) for boundary in own)
        if shift and boundaries == own:
            results.append(ShiftResult(shift, boundaries, None, 0))
            continue
        speculative = replace(own_options, capture_layers=boundaries if shift else None, strict=True)
        with load_runtime(target, speculative, None, max_batch=BATCH, **options) as runtime:
            drafted, accepted = _first_position(runtime, prompts, max_tokens, chat)
            if not shift:
                checks = SpeculativeConfig(model=head, method=own_options.method).check(runtime)
        results.append(ShiftResult(shift, boundaries, drafted, accepted))
    return results, checks


def _first_position(runtime: Runtime, prompts: Sequence[Prompt], max_tokens: int, chat: bool) -> tuple[int, int]:
    """Drafts and acceptances at the first position, over all prompts."""
    params = SamplingParams(max_tokens=max_tokens)
    for prompt in prompts:
        runtime.submit(chat_ids(runtime.codec, prompt) if chat and isinstance(prompt, str) else prompt, params)
    while runtime.busy:
        for output in runtime.step():
            if output.error is not None:
                raise LowlatError(f"a prompt failed: {output.error}")
    block = runtime.summary().get("eagle_speculation")
    return (block["drafted_by_position"][0], block["accepted_by_position"][0]) if block else (0, 0)


def unshifted_is_best(results: Sequence[ShiftResult]) -> bool:
    """Return whether no shift has a higher acceptance than the unshifted boundaries; False without drafts."""
    rates = {result.shift: result.acceptance for result in results}
    own = rates.get(0)
    return own is not None and all(rate is None or rate <= own for rate in rates.values())
