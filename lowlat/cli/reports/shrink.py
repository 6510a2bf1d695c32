"""This module makes the report of `lowlat draft-model shrink`: the chosen ids, and both draft models compared."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lowlat.cli.reports.shifts import read_prompts
from lowlat.cli.running import Generation, chat_ids, load_runtime, run_request
from lowlat.engine.metrics import SpeculativeDecodingStats
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError, LowlatError
from lowlat.graphs.program import Op
from lowlat.models.target import read_model_config
from lowlat.options.request import SamplingParams
from lowlat.options.speculative import SpeculativeConfig
from lowlat.text import TextCodec
from lowlat.text.counts import count_text, count_token_ids
from lowlat.tools.draft_model import shrink_draft_model
from lowlat.tools.draft_model.shrink import head_vocabulary

__all__ = ["measure", "shrink_report"]

WARM_UP_TOKENS = 4
SHOWN_IDS = 16
DRAFTING = "DRAFT_"


def shrink_report(
    directory: Path,
    out: Path,
    draft_vocab: int,
    *,
    text: Path | None,
    token_ids: Path | None,
    target: Path | None,
    keep: Sequence[int],
    keep_chat_tokens: bool,
) -> dict[str, Any]:
    """Count tokens, choose the ids, write the draft model, and report the result. Raises ConfigError."""
    vocab = head_vocabulary(directory, target)
    codec = None if target is None else TextCodec.load(target)
    kept = set(keep)
    for token in kept:
        if not 0 <= token < vocab:
            raise ConfigError(f"keep: token id {token} is not from 0 to {vocab - 1}")
    if target is not None:
        kept |= set(read_model_config(target).eos_token_ids)
    try:
        if codec is None and (text is not None or keep_chat_tokens):
            raise ConfigError(f"{target}: there is no tokenizer.json; count token ids (--token-ids) instead")
        if codec is not None and keep_chat_tokens:
            if not codec.has_chat_template:
                raise ConfigError(f"{target}: has no chat template whose tokens could be kept (--keep-chat-tokens)")
            kept |= {token for token in codec.template_tokens() if token < vocab}
        if text is not None and codec is not None:
            counts = count_text(text, codec, vocab)
        elif token_ids is not None:
            counts = count_token_ids(token_ids, vocab)
        else:
            raise ConfigError("neither a text nor token ids to count")
    finally:
        if codec is not None:
            codec.close()
    made = shrink_draft_model(directory, out, counts.chosen_by, draft_vocab, keep=kept, target=target)
    return {
        "head": str(directory),
        "out": str(out),
        "counted_tokens": int(counts.chosen_by.sum()),
        "held_out_tokens": int(counts.held_out.sum()),
        "kept": len(kept) - len(made.not_kept),
        "not_kept": list(made.not_kept)[:SHOWN_IDS],
        "never_seen": int((counts.chosen_by[made.new_ids] == 0).sum()),
        "old": _side(counts.coverage(made.old_ids), made.old_ids, made.old_bytes, made.lm_head_row_bytes),
        "new": _side(counts.coverage(made.new_ids), made.new_ids, made.new_bytes, made.lm_head_row_bytes),
    }


def _side(coverage: float | None, ids: torch.Tensor, size: int, row_bytes: int) -> dict[str, Any]:
    return {"draft_vocab": len(ids), "coverage": coverage, "bytes": size, "lm_head_bytes": len(ids) * row_bytes}


def measure(
    target: Path,
    old: Path,
    new: Path,
    prompts: Path,
    *,
    num_prompts: int,
    max_tokens: int,
    chat: bool,
    num_speculative_tokens: int,
    device: str,
) -> dict[str, Any]:
    """Decode the prompts greedily without a draft model and with each; acceptance, times, and whether the tokens agree.

    The time of drafting is measured only with the reference executor on a CPU, where operations run one by one. With
    other executors, compare step times: the rest of a step is the same. Raises ConfigError.
    """
    params = SamplingParams(max_tokens=max_tokens)
    found = read_prompts(prompts, num_prompts)
    results: dict[str, Any] = {}
    tokens: list[list[list[int]]] = []
    for name, head in (("without", None), ("old", old), ("new", new)):
        speculative = None
        if head is not None:
            speculative = SpeculativeConfig(model=head, num_speculative_tokens=num_speculative_tokens, strict=True)
        with load_runtime(target, speculative, None, max_batch=1, device=device) as runtime:
            where = f"{runtime.device_choice.device} ({runtime.executor.name} executor)"
            ids = [chat_ids(runtime.codec, prompt) if chat and isinstance(prompt, str) else prompt for prompt in found]
            run_request(runtime, ids[0], SamplingParams(max_tokens=min(WARM_UP_TOKENS, max_tokens)))
            clock = _DraftClock(runtime)
            runs = [run_request(runtime, prompt, params) for prompt in ids]
            results[name] = _figures(runs, clock.seconds)
        tokens.append([run.token_ids for run in runs])
    return {
        "num_prompts": len(found),
        "num_speculative_tokens": num_speculative_tokens,
        "device": where,
        "identical": all(other == tokens[0] for other in tokens[1:]),
        **results,
    }


class _DraftClock:
    """Adds up the time of the drafting stages' operations; `seconds` is None where it cannot be told."""

    def __init__(self, runtime: Runtime) -> None:
        measurable = runtime.executor.name == "reference" and runtime.device_choice.device.type == "cpu"
        self.seconds: float | None = 0.0 if measurable else None
        self._last = 0.0
        if measurable:
            runtime.executor.set_hook(self._after)

    def _after(self, op: Op, _: object) -> None:
        now = time.perf_counter()
        # what precedes a stage's first operation may be the host's: it is left out
        if op.stage.startswith(DRAFTING) and self._last and self.seconds is not None:
            self.seconds += now - self._last
        self._last = now


def _figures(runs: Sequence[Generation], draft_s: float | None) -> dict[str, Any]:
    stats = SpeculativeDecodingStats()
    for run in runs:
        if run.error is not None:
            raise LowlatError(f"a prompt failed: {run.error}")
        if run.record.speculation is not None:
            stats.merge(run.record.speculation)
    seconds = sum(run.record.decode_s or 0.0 for run in runs)
    steps = sum(run.record.num_steps for run in runs)
    decoded = sum(run.record.decoded_tokens for run in runs)
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "mean_acceptance_rate": stats.mean_acceptance_rate,
        "acceptance_by_position": stats.acceptance_by_position,
        "tokens_per_s": decoded / seconds if seconds else 0.0,
        "step_ms": 1e3 * seconds / steps if steps else 0.0,
        "draft_ms": None if draft_s is None or not steps else 1e3 * draft_s / steps,
    }
