"""`lowlat draft-model shrink`: a draft model that drafts fewer ids, and so drafts faster."""

from pathlib import Path
from typing import Any

import click

from lowlat.cli.console import format_bytes, print_json, print_table
from lowlat.cli.help import SectionedCommand, SectionedGroup
from lowlat.cli.options import IntegerList, as_json, depth_option, record_options
from lowlat.cli.paths import FILE, MODEL, NEW_FOLDER
from lowlat.options.runtime import RuntimeConfig

__all__ = ["command", "shrink"]


@click.group("draft-model", cls=SectionedGroup)
def command() -> None:
    """Make one EAGLE3 draft model of another."""


@command.command("shrink", cls=SectionedCommand)
@click.argument("directory", type=MODEL)
@click.option("--out", type=NEW_FOLDER, required=True, metavar="DIR", help="Where to write the new draft model.")
@click.option("--draft-vocab", type=int, required=True, metavar="N", help="Ids that the new one drafts.")
@click.option("--text", type=FILE, metavar="FILE", help="Text to count tokens in; needs --target's tokenizer.")
@click.option("--token-ids", type=FILE, metavar="FILE", help="Token ids to count, as numbers or in .json lists.")
@click.option("--target", type=MODEL, metavar="DIR", help="The draft model's target; its stop ids are kept.")
@click.option("--keep-chat-tokens", is_flag=True, help="Keep the special tokens that the target's chat template uses.")
@click.option("--keep", type=IntegerList(), metavar="ID,ID,...", help="Keep these ids, too.")
@click.option("--prompts", type=FILE, metavar="FILE", help="Measure both draft models on these; see `lowlat doctor`.")
@click.option("--num-prompts", type=click.IntRange(1, 256), default=8, show_default=True, help="Prompts to take.")
@click.option("--max-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens a prompt.")
@click.option("--chat", is_flag=True, help="Wrap the prompts in the target's chat template.")
@depth_option("Depth of speculation, where it is measured.")
@record_options(RuntimeConfig, "device", filled=True)
@as_json
def shrink(
    directory: Path,
    out: Path,
    draft_vocab: int,
    text: Path | None,
    token_ids: Path | None,
    target: Path | None,
    keep_chat_tokens: bool,
    keep: tuple[int, ...] | None,
    prompts: Path | None,
    json_output: bool,
    **measuring: Any,
) -> None:
    """Write a draft model that drafts the N ids most frequent in a text, of those that DIRECTORY drafts.

    Every tenth part of the text is held out, and tells how much of such text the ids cover. With --target and
    --prompts both draft models decode the prompts: acceptance, time of drafting, and the tokens, which must be
    identical (exit code 1 otherwise).
    """
    if (text is None) == (token_ids is None):
        raise click.UsageError("give the tokens to count in one of --text and --token-ids")
    for option, value in (("--text", text), ("--keep-chat-tokens", keep_chat_tokens), ("--prompts", prompts)):
        if value and target is None:
            raise click.UsageError(f"{option} needs --target DIR")

    from lowlat.cli.models import local_draft_model, local_target
    from lowlat.cli.reports.shrink import measure, shrink_report

    target = None if target is None else local_target(target)
    directory = local_draft_model(directory, target)
    report = shrink_report(
        directory, out, draft_vocab, text=text, token_ids=token_ids, target=target,
        keep=keep or (), keep_chat_tokens=keep_chat_tokens,
    )  # fmt: skip
    if prompts is not None and target is not None:
        report["measured"] = measure(target, directory, out, prompts, **measuring)
    if json_output:
        print_json(report)
    else:
        _print(report)
    if not report.get("measured", {}).get("identical", True):
        raise click.exceptions.Exit(1)


def _print(report: dict[str, Any]) -> None:
    def share(value: float | None) -> str:
        return "nothing was held out" if value is None else f"{value:.2%}"

    old, new = report["old"], report["new"]
    rows = [
        ["draft ids", old["draft_vocab"], new["draft_vocab"]],
        ["coverage of held-out tokens", share(old["coverage"]), share(new["coverage"])],
        ["all tensors", format_bytes(old["bytes"]), format_bytes(new["bytes"])],
        ["LM head read by a draft", format_bytes(old["lm_head_bytes"]), format_bytes(new["lm_head_bytes"])],
    ]
    print_table(f"draft model {report['out']}", ("what", "before", "after"), rows)
    counted, held = report["counted_tokens"], report["held_out_tokens"]
    click.echo(f"{counted:,} tokens counted, {held:,} held out, {report['kept']} ids kept whatever their count")
    if report["never_seen"]:
        click.echo(f"{report['never_seen']} of the ids occur nowhere in it: a longer text would choose better")
    if report["not_kept"]:
        click.echo(f"not kept, because the old draft model does not draft them either: {report['not_kept']}")
    measured = report.get("measured")
    if measured is None:
        return
    names = {
        "mean_acceptance_length": "tokens a drafted step",
        "mean_acceptance_rate": "drafts accepted",
        "tokens_per_s": "tokens a second",
        "step_ms": "ms a step",
        "draft_ms": "ms a step, drafting",
    }
    first, second = measured["old"], measured["new"]
    rows = [[text, _cell(first[key]), _cell(second[key])] for key, text in names.items()]
    print_table(f"{measured['num_prompts']} prompts on {measured['device']}", ("what", "before", "after"), rows)
    click.echo("the tokens are identical" if measured["identical"] else "THE TOKENS DIFFER")


def _cell(value: float | None) -> str:
    return "not measured on this executor" if value is None else f"{value:.3f}"
