"""`lowlat compare`: stage by stage against transformers, or against tensors that another engine or lowlat saved.

transformers may run another target of the same shape, such as the original of a quantised one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.console import loading_bar, print_json, print_table
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import IntegerList, as_json, draft_model_option, record_options
from lowlat.cli.paths import MODEL, NEW_PATH
from lowlat.options.model_names import find_repository
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

if TYPE_CHECKING:
    from lowlat.tools.compare.recording import Recording

__all__ = ["command"]

DEFAULT_PROMPT_LENGTH = 48
DEFAULT_NUM_TOKENS = 16
COSINE = click.FloatRange(-1.0, 1.0)
COLUMNS = ("stage", "rows", "mean difference", "max difference", "cosine", "top-10 overlap", "")


@click.command("compare", cls=SectionedCommand)
@click.argument("target", type=MODEL)
@draft_model_option("An EAGLE3 draft model to compare as well.")
@click.option(
    "--against",
    metavar="transformers|FILE|MODEL",
    help="The other implementation: transformers, the default, a recording that another engine or --save wrote, or a "
    "target for transformers to run: the plain original of a quantised one.",
)
@click.option("--save", type=NEW_PATH, metavar="FILE", help="Write lowlat's own tensors to this safetensors file.")
@click.option("--prompt", metavar="TEXT", help="Text to start from; needs a tokenizer.")
@click.option("--token-ids", type=IntegerList(), metavar="ID,ID,...", help="Token ids to start from.")
@click.option(
    "--num-tokens",
    type=click.IntRange(1, 1024),
    help=f"Tokens to decode.  [default: {DEFAULT_NUM_TOKENS}, or the recording's]",
)
@click.option(
    "-S",
    "--num-speculative-tokens",
    type=click.IntRange(1, MAX_SPECULATIVE_TOKENS),
    metavar="N",
    help=f"Levels of drafts to compare.  [default: {SpeculativeConfig.num_speculative_tokens}, or the recording's]",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "auto"]), default="float32", show_default=True)
@record_options(RuntimeConfig, "device", filled=True)
@click.option(
    "--executor",
    type=click.Choice(["reference", "eager"]),
    default="reference",
    show_default=True,
    help="How lowlat computes; eager, a GPU's kernels, shows no residual streams of the prompt.",
)
@click.option(
    "--min-cosine",
    type=COSINE,
    default=0.999,
    show_default=True,
    help="A stage's tolerance: the worst row's cosine.",
)
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    metavar="STAGE=COSINE",
    help="Another for one stage, or for all that have a part of its name: draft.2.logits, logits, draft. Repeatable; "
    "later ones win.",
)
@as_json
@click.pass_context
def command(
    context: click.Context,
    /,
    target: Path,
    head: Path | None,
    against: str | None,
    save: Path | None,
    prompt: str | None,
    token_ids: tuple[int, ...] | None,
    num_tokens: int | None,
    num_speculative_tokens: int | None,
    min_cosine: float,
    tolerances: tuple[str, ...],
    json_output: bool,
    **options: Any,
) -> None:
    """Compare a target, and a draft model, stage by stage with an independent implementation.

    A few greedy tokens are decoded. The target's residual streams, pre_head_hidden and logits, and the draft model's
    fc_out and, for each level of drafts, attn_out, ffn_out, pre_head_hidden and logits are set next to those of
    transformers (the target) and of plain torch (the draft model), or next to a recording: mean and largest difference,
    cosine of the worst row, overlap of the ten likeliest ids. lowlat/tools/README.md describes a recording's file,
    which any engine can write. Only rows that rest on the same tokens and drafts are compared. Another target is given
    lowlat's tokens and drafts.

    Exits with 1 when a stage is beyond its tolerance: when a row has a lower cosine, or lies farther away than rows of
    equal length with that cosine do. The first such stage is named. --save alone compares nothing.
    """
    from lowlat.cli.models import local_draft_model, local_target
    from lowlat.executors.devices import leave_a_core
    from lowlat.tools.compare.recording import save_recording
    from lowlat.tools.compare.stages import record
    from lowlat.tools.transformers_model import transformers_version

    leave_a_core()
    if prompt is not None and token_ids is not None:
        raise click.UsageError("give --prompt or --token-ids, not both")
    limits = _tolerances(tolerances)
    directory = local_target(target)
    draft = None if head is None else local_draft_model(head, directory)
    saved, original = _counterpart(against, directory)
    if saved is None and (save is None or against is not None):
        transformers_version()  # raises before anything is loaded if it is absent
    start = _prompt(directory, saved) if prompt is None and token_ids is None else prompt or token_ids or ()
    options |= _lengths(saved, num_tokens, num_speculative_tokens)
    with loading_bar(f"loading {target.name}") as update:
        found = record(directory, draft, start, progress=update, **options)
    if save is not None:
        save_recording(found, save)
        click.echo(f"saved {len(found.stages)} stages of {len(found.tokens)} tokens to {save}", err=True)
        if against is None:
            return
    _check_limits(limits, found)
    report = _compare(found, saved, original, draft, options["dtype"], [(None, min_cosine), *limits])
    if original != directory:
        report["against"] = f"{against} by transformers"
    report |= {"target": str(target), "head": None if head is None else str(head), "executor": options["executor"]}
    if json_output:
        print_json(report)
    else:
        _show(report)
    context.exit(0 if report["passed"] else 1)


def _tolerances(entries: Sequence[str]) -> list[tuple[str, float]]:
    """Stage and cosine of entries `STAGE=COSINE`; anything else is a usage error."""
    limits = []
    for entry in entries:
        stage, _, cosine = entry.partition("=")
        if not stage or not cosine:
            raise click.BadParameter(f"{entry!r:.80} is not STAGE=COSINE", param_hint="--tolerance")
        limits.append((stage, COSINE(cosine)))
    return limits


def _counterpart(against: str | None, target: Path) -> tuple[Recording | None, Path]:
    """The recording that a target is compared with, if any, and the model that transformers runs."""
    if against is None or against == "transformers":
        return None, target
    from lowlat.cli.models import local_target
    from lowlat.tools.compare.recording import load_recording
    from lowlat.tools.compare.stages import check_same_shape

    if find_repository(against) is None and not Path(against).is_dir():
        return load_recording(against), target
    original = local_target(Path(against))
    check_same_shape(target, original)
    return None, original


def _check_limits(limits: Sequence[tuple[str, float]], found: Recording) -> None:
    """Refuse a tolerance of a stage that there is not."""
    for stage, _ in limits:
        if not any(_has_part(name, stage) for name in found.stages):
            names = ", ".join(found.stages)
            raise click.BadParameter(f"{stage!r:.80} is part of no stage of {names}", param_hint="--tolerance")


def _has_part(stage: str, part: str) -> bool:
    return f".{part}." in f".{stage}."


def _lengths(saved: Recording | None, num_tokens: int | None, depth: int | None) -> dict[str, int]:
    """Tokens to decode and depth of the drafts: those asked for, or the recording's."""
    if saved is not None:
        num_tokens = num_tokens or max(1, len(saved.tokens) - saved.num_prompt)
        depth = depth or min(MAX_SPECULATIVE_TOKENS, len(saved.drafts[0]) if saved.drafts else 0)
    depth = depth or SpeculativeConfig.num_speculative_tokens
    return {"num_tokens": num_tokens or DEFAULT_NUM_TOKENS, "num_speculative_tokens": depth}


def _prompt(target: Path, saved: Recording | None) -> Sequence[int]:
    """The saved prompt, or else arbitrary token ids."""
    from lowlat.models.target import read_model_config

    if saved is not None:
        return saved.tokens[: saved.num_prompt]
    vocab = read_model_config(target).vocab_size
    return [(7919 * place + 104729) % vocab for place in range(DEFAULT_PROMPT_LENGTH)]


def _compare(
    found: Recording,
    saved: Recording | None,
    target: Path,
    head: Path | None,
    dtype: str,
    limits: Sequence[tuple[str | None, float]],
) -> dict[str, Any]:
    """The report that both forms of output show."""
    from lowlat.tools.compare.stages import common_rows, differences, shared_tokens

    if saved is None:
        from lowlat.tools.compare.reference import expected_recording

        expected = expected_recording(found, target, head, dtype)
        chosen = expected.stages["target.logits"].argmax(-1).tolist()
        identical = tuple(chosen) == found.tokens[found.num_prompt :]
    else:
        expected = saved
        identical = shared_tokens(found, saved) == min(len(found.tokens), len(saved.tokens))
    ours, theirs, left_out = common_rows(found, expected)
    stages = []
    for stage in differences(ours, theirs):
        least = [cosine for part, cosine in limits if part is None or _has_part(stage.stage, part)][-1]
        stages.append({**stage.to_dict(), "min_cosine": least, "passed": stage.within(least)})
    beyond = [stage["stage"] for stage in stages if not stage["passed"]]
    return {
        "against": "transformers" if saved is None else "a recording",
        "dtype": dtype,
        "num_tokens": len(found.tokens),
        "greedy_identical": identical,
        "passed": bool(stages) and not beyond,
        "first_beyond_tolerance": beyond[0] if beyond else None,
        "not_compared": left_out,
        "stages": stages,
    }


def _show(report: dict[str, Any]) -> None:
    def shown(value: float | None, form: str, absent: str = "not finite") -> str:
        return absent if value is None else format(value, form)

    rows = [
        (
            stage["stage"],
            stage["num_rows"],
            shown(stage["mean_difference"], ".2e"),
            shown(stage["max_difference"], ".2e"),
            shown(stage["cosine"], ".7f"),
            shown(stage["top_k_overlap"], ".0%", ""),
            "" if stage["passed"] else "FAILED",
        )
        for stage in report["stages"]
    ]
    if report["not_compared"]:
        click.echo(f"not compared, only one side has such rows: {', '.join(report['not_compared'])}")
    print_table(f"{report['target']} against {report['against']}, {report['dtype']}", COLUMNS, rows)
    first, same = report["first_beyond_tolerance"], "the same" if report["greedy_identical"] else "other"
    verdict = "passed" if report["passed"] else f"FAILED from {first} on" if first else "nothing to compare"
    click.echo(f"{verdict}: {same} greedy tokens; tolerances are cosines (--min-cosine, --tolerance)")
