"""`lowlat compare`: stage by stage against transformers, or against tensors saved by an earlier comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.console import loading_bar, print_json, print_table
from lowlat.cli.options import DIRECTORY, IntegerList, as_json, depth_option, draft_model_option, record_options
from lowlat.options.config import RuntimeConfig

if TYPE_CHECKING:
    from lowlat.tools.compare.stages import Recording

__all__ = ["command"]

DEFAULT_PROMPT_LENGTH = 48
COLUMNS = ("stage", "rows", "mean difference", "max difference", "cosine", "top-10 overlap", "")


@click.command("compare")
@click.argument("target", type=DIRECTORY)
@draft_model_option("An EAGLE3 draft model to compare as well.")
@click.option(
    "--against",
    metavar="transformers|DIR",
    help="The other implementation: transformers, the default, or a directory written by --save.",
)
@click.option("--save", type=DIRECTORY, metavar="DIR", help="Write lowlat's own tensors to this directory.")
@click.option("--prompt", metavar="TEXT", help="Text to start from; needs a tokenizer.")
@click.option("--token-ids", type=IntegerList(), metavar="ID,ID,...", help="Token ids to start from.")
@click.option("--num-tokens", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens to decode.")
@depth_option("Levels of drafts to compare.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "auto"]), default="float32", show_default=True)
@record_options(RuntimeConfig, "device", filled=True)
@click.option(
    "--min-cosine",
    type=click.FloatRange(-1.0, 1.0),
    default=0.999,
    show_default=True,
    help="Exit with 1 when the worst row of a stage has a lower one.",
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
    min_cosine: float,
    json_output: bool,
    **options: Any,
) -> None:
    """Compare a target, and a draft model, stage by stage with an independent implementation.

    A few greedy tokens are decoded, and every residual stream, the logits and each stage of the drafts are set beside
    those of transformers (the target) and of plain torch (the draft model), or beside saved tensors: mean and largest
    difference, cosine of the worst row, overlap of the ten likeliest ids. Exits with 1 when a stage falls below
    --min-cosine. --save alone compares nothing.
    """
    from lowlat.cli.models import local_draft_model, local_target
    from lowlat.executors.devices import leave_a_core
    from lowlat.tools.compare.stages import load_recording, record, save_recording

    leave_a_core()
    if prompt is not None and token_ids is not None:
        raise click.UsageError("give --prompt or --token-ids, not both")
    directory = local_target(target)
    draft = None if head is None else local_draft_model(head, directory)
    saved = None if against in (None, "transformers") else load_recording(str(against))
    start = _prompt(directory, saved) if prompt is None and token_ids is None else prompt or token_ids or ()
    with loading_bar(f"loading {target.name}") as update:
        found = record(directory, draft, start, progress=update, **options)
    if save is not None:
        path = save_recording(found, save)
        click.echo(f"saved {len(found.stages)} stages of {len(found.tokens)} tokens to {path}", err=True)
        if against is None:
            return
    report = _compare(found, saved, directory, draft, options["dtype"], min_cosine)
    report |= {"target": str(target), "head": None if head is None else str(head)}
    if json_output:
        print_json(report)
    else:
        _show(report)
    context.exit(0 if report["passed"] else 1)


def _prompt(target: Path, saved: Recording | None) -> Sequence[int]:
    """The saved prompt, or else arbitrary token ids."""
    from lowlat.models.target import read_model_config

    if saved is not None:
        return saved.tokens[: saved.num_prompt]
    vocab = read_model_config(target).vocab_size
    return [(7919 * place + 104729) % vocab for place in range(DEFAULT_PROMPT_LENGTH)]


def _compare(
    found: Recording, saved: Recording | None, target: Path, head: Path | None, dtype: str, min_cosine: float
) -> dict[str, Any]:
    """The report that both forms of output show."""
    from lowlat.tools.compare.stages import common_rows, differences

    if saved is None:
        from lowlat.tools.compare.reference import expected_recording

        expected = expected_recording(found, target, head, dtype)
        chosen = expected.stages["target.logits"].argmax(-1).tolist()
        identical = tuple(chosen) == found.tokens[found.num_prompt :]
    else:
        identical = saved.tokens == found.tokens
        found, expected = common_rows(found, saved)
    stages = differences(found.stages, expected.stages)
    return {
        "against": "transformers" if saved is None else "saved tensors",
        "dtype": dtype,
        "num_tokens": len(found.tokens),
        "greedy_identical": identical,
        "min_cosine": min_cosine,
        "passed": bool(stages) and all(stage.reaches(min_cosine) for stage in stages),
        "stages": [{**stage.to_dict(), "passed": stage.reaches(min_cosine)} for stage in stages],
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
    print_table(f"{report['target']} against {report['against']}, {report['dtype']}", COLUMNS, rows)
    failed = [stage["stage"] for stage in report["stages"] if not stage["passed"]]
    tokens = "the same" if report["greedy_identical"] else "other"
    verdict = "passed" if report["passed"] else f"FAILED from {failed[0]} on" if failed else "nothing to compare"
    click.echo(f"{verdict}: {tokens} greedy tokens; a stage needs a cosine of {report['min_cosine']} (--min-cosine)")
