"""`lowlat doctor --exactness`: the pair, its prompts, and a line a sweep."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from lowlat.cli.running import chat_ids, load_runtime
from lowlat.options.config import AUTO_METHOD, SpeculativeConfig
from lowlat.speculators.methods import settled
from lowlat.text import TextCodec
from lowlat.tools.exactness import Exactness, Sweep, measure_exactness

__all__ = ["check_exactness", "print_sweep"]


def check_exactness(
    target: Path,
    draft_model: Path | None,
    prompts: Sequence[str | list[int]],
    depth: int,
    report: Callable[[Sweep], None] | None,
    *,
    max_tokens: int,
    chat: bool,
    device: str,
) -> Exactness:
    """Compare a pair's answers with plain decoding, draft lengths 0 to `depth`; `draft_model` None: the target's own.

    chat  texts are messages of the target's chat template
    Raises ConfigError and LowlatError as `measure_exactness` does.
    """
    speculative = SpeculativeConfig(model=draft_model, method=AUTO_METHOD, num_speculative_tokens=depth)
    if chat:
        codec = TextCodec.load(target)
        prompts = [chat_ids(codec, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return measure_exactness(
        target,
        settled(speculative, target),
        prompts,
        max_tokens=max_tokens,
        load=load_runtime,
        report=report,
        device=device,
    )


def print_sweep(sweep: Sweep) -> None:
    """One line: how many answers were compared, and how many differ."""
    if sweep.skipped is not None:
        click.echo(f"{sweep.name}: not run: {sweep.skipped}")
        return
    drafts = f", {sweep.accepted} of {sweep.drafted} drafts accepted" if sweep.drafted else ""
    cached = f", {sweep.cached_tokens} tokens of prompts from the cache" if sweep.cached_tokens else ""
    equal = "all equal" if not sweep.different else f"{sweep.different} DIFFER"
    click.echo(f"{sweep.name}: {sweep.requests} answers, {sweep.tokens} tokens{drafts}{cached}: {equal}")
