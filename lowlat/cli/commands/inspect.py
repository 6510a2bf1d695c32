"""`lowlat inspect model|draft-model|tree`: geometry, memory and buffers, from configs and headers alone;
`lowlat inspect step`: what a step does, see `lowlat.cli.commands.inspect_step`;
`lowlat inspect run`: a pair decodes a few prompts; `lowlat inspect quality`: a target predicts a text.
"""

from copy import copy
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.collection import rare_collections
from lowlat.cli.commands.inspect_step import step
from lowlat.cli.console import (
    check_json_file,
    format_bytes,
    prefill_line,
    print_json,
    print_table,
    stream_text,
    write_json,
)
from lowlat.cli.help import SectionedCommand, SectionedGroup
from lowlat.cli.options import (
    IntegerList,
    as_json,
    bundled,
    draft_model_option,
    given_options,
    json_file_option,
    record_options,
    runtime_options,
    speculation_options,
    speculative_config,
)
from lowlat.cli.paths import FILE, MODEL
from lowlat.cli.reports.trees import DEFAULT_BUDGETS, print_tree, print_what_if, tree_report, what_if_report
from lowlat.options.request import SamplingParams
from lowlat.options.runtime import MAX_BATCH, MAX_CONTEXT, RuntimeConfig
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

if TYPE_CHECKING:
    from lowlat.cli.reports.activity import Activity

__all__ = ["command", "draft_model", "model", "quality", "run", "step", "tree"]

NOT_ACTIVE = 3  # exit code of `run`
CONTEXT, BATCH = click.IntRange(2, MAX_CONTEXT), click.IntRange(1, MAX_BATCH)


class _ModelByDefault(SectionedGroup):
    """A group whose first word may be a model, where it is no command: `lowlat inspect ORG/NAME`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command; `model` where the word is none, nor like one, and no option."""
        word = args[0]
        known = self.get_command(ctx, word) is not None or word.startswith("-")
        path = "/" in word or Path(word).exists()
        if not known and (path or not get_close_matches(word, self.list_commands(ctx))):
            args = ["model", *args]
        return super().resolve_command(ctx, args)


@click.group("inspect", cls=_ModelByDefault)
def command() -> None:
    """Show what a model, a draft model or a tree is, and what it takes; `inspect MODEL` is `inspect model MODEL`."""


@command.command("model", cls=SectionedCommand)
@click.argument("directory", type=MODEL, required=False)
@record_options(
    SpeculativeConfig,
    *("head", "method", "num_speculative_tokens", "draft_vocab", "draft_vocab_size"),
    *("tree", "dynamic_tree_max_topk", "max_total_draft_tokens"),
)
@click.option(
    "--context", type=CONTEXT, metavar="N", help="Tokens of a request.  [default: 2048, or the model's if less]"
)
@click.option("--batch", type=BATCH, default=RuntimeConfig.max_batch, show_default=True, metavar="N", help="Slots.")
@record_options(RuntimeConfig, "dtype", "device", "tensor_parallel_size", "activations", "kv_cache_gib", filled=True)
@click.option("--buffers", is_flag=True, help="List the buffers of the step for --batch slots at depth -S.")
@as_json
@rare_collections()
def model(
    directory: Path | None,
    context: int | None,
    batch: int,
    dtype: str,
    device: str,
    tensor_parallel_size: int,
    activations: str | None,
    kv_cache_gib: float | str | None,
    buffers: bool,
    json_output: bool,
    **values: Any,
) -> None:
    """Show a target's geometry, parameters, bytes by part, and the memory that a runtime of it needs.

    DIRECTORY is a Hugging Face directory, or ORG/NAME of a repository, of which the weights' headers alone are read and
    what a download would take is told; without one, it is the bundled model.
    """
    pair = directory or bundled("target"), speculative_config(values, needed=True)

    from lowlat.cli.models import outlined
    from lowlat.cli.reports.models import download_report, model_report

    with outlined(*pair) as (target, speculative, draft_download):
        report = model_report(
            target.directory,
            speculative,
            {
                "max_context": context,
                "max_batch": batch,
                "dtype": dtype,
                "device": device,
                "tensor_parallel_size": tensor_parallel_size,
                "activations": activations,
                "kv_cache_gib": kv_cache_gib,
            },
            buffers=buffers,
            context_flag="--context",
        )
    report["directory"] = str(target.directory if target.download is None else pair[0])
    report["download"] = download_report(target.download, draft_download)
    if json_output:
        print_json(report)
    else:
        _print_model(report)


def _print_model(report: dict[str, Any]) -> None:
    print_table(f"target {report['directory']}", ("field", "value"), _fields(report["geometry"]))
    _print_parts(report["parts"])
    if "head_parts" in report:
        _print_parts(report["head_parts"], "of the draft model: ")
    kv, memory = report["kv"], report["memory"]
    rows = [
        ["KV bytes a token, target", kv["bytes_per_token"]],
        ["KV bytes a token, draft model", kv["head_bytes_per_token"]],
        *(
            [["KV bytes a token, in windows of layers", kv["window_bytes_per_token"]]]
            if "window_bytes_per_token" in kv
            else []
        ),
        ["context", kv["max_context"]],
        ["slots", kv["max_batch"]],
        ["KV blocks", kv["num_blocks"]],
        *([f"KV blocks, window of {each['window']}", each["num_blocks"]] for each in kv.get("windows", ())),
        ["block size", kv["block_size"]],
        ["tokens that it holds", kv["capacity_tokens"]],
        *(
            [f"recurrent state, bytes of a {what}", kv[name]]
            for name, what in (("state_bytes_per_slot", "slot"), ("snapshot_bytes", "snapshot"))
            if name in kv
        ),
    ]
    print_table("KV cache", ("what", "count"), rows)
    click.echo(prefill_line(report["prefill"]))
    gpus = report.get("cards", [memory])
    rows = [
        [name.removesuffix("_bytes").replace("_", " "), *(format_bytes(each[name]) for each in gpus)] for name in memory
    ]
    sizes = ["size"] if len(gpus) == 1 else [f"GPU {number}" for number in range(len(gpus))]
    print_table(f"memory needed on {report['device']}, executor {report['executor']}", ("part", *sizes), rows)
    click.echo(f"{report['device']}: {report['device_reason']}")
    files = report["files"]
    if files is None:
        click.echo("weights: no files are there; all figures are the config's")
    else:
        size = format_bytes(files["bytes"])
        click.echo(f"weights: {size} in {files['count']} files, {files['tensors']} tensors, as the config asks for")
    _print_download(report["download"])
    advice = ", ".join(f"{name} {value:g}" for name, value in report["sampling_advice"].items())
    click.echo(f"sampling that its authors advise, which --sampling-defaults takes or not: {advice or 'none'}")
    default = report["default_capture_boundaries"]
    click.echo(
        f"capture boundaries of a draft model that names none: {default or 'none, the target has too few layers'}"
    )
    if "buffers" in report:
        title = f"buffers of one step: {report['bucket']}"
        rows = [list(buffer.values()) for buffer in report["buffers"]]
        print_table(title, ("name", "shape", "dtype", "role", "bytes"), rows)


def _print_download(download: dict[str, Any] | None) -> None:
    if download is not None:
        size, free = format_bytes(download["bytes"]), format_bytes(download["free_bytes"])
        click.echo(f"to fetch: {size} in {download['files']} files, into {download['cache']}, where {free} are free")


def _fields(values: dict[str, Any], prefix: str = "") -> list[list[object]]:
    """Rows of a table of fields, nested ones by their path; numbers as they stand, so that they can be copied."""
    rows: list[list[object]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _fields(value, f"{prefix}{name}.")
        elif name == "layers":
            for number, kind in enumerate(value):
                rows += _fields(kind, f"{prefix}{name}.{number}." if len(value) > 1 else f"{prefix}{name}.")
        elif name == "windows" and set(value) == {None}:
            rows.append([f"{prefix}{name}", "full attention in every layer"])
        else:
            rows.append([f"{prefix}{name}", "none" if value is None else str(value)])
    return rows


def _print_parts(parts: dict[str, dict[str, int]], prefix: str = "") -> None:
    rows = [[part, entry["parameters"], format_bytes(entry["bytes"])] for part, entry in parts.items()]
    print_table(f"{prefix}parameters and bytes by part", ("part", "parameters", "size"), rows)


@command.command("draft-model", cls=SectionedCommand)
@click.argument("directory", type=MODEL, required=False)
@click.option("--target", type=MODEL, metavar="DIR", help="The draft model's target.")
@click.option(
    "--capture-layers", type=IntegerList(), metavar="B,B,B", help="Boundaries in place of those of the config."
)
@as_json
@rare_collections()
def draft_model(
    directory: Path | None, target: Path | None, capture_layers: tuple[int, ...] | None, json_output: bool
) -> None:
    """Show an EAGLE3 draft model's geometry, flags, layout, capture boundaries and draft vocabulary.

    DIRECTORY and --target go together, as directories or ORG/NAME; without them, it is the bundled pair.
    """
    if (directory is None) != (target is None):
        raise click.UsageError("DIRECTORY and --target go together: a draft model is read for its target")
    from lowlat.cli.models import outlined
    from lowlat.cli.reports.models import download_report, draft_report

    names = directory or bundled("head"), target or bundled("target")
    with outlined(names[0], None) as (head, *_), outlined(names[1], None) as (its_target, *_):
        report = draft_report(head.directory, its_target.directory, capture_layers)
    report |= {"directory": str(names[0]), "target": str(names[1]), "download": download_report(head.download)}
    if json_output:
        print_json(report)
        return
    print_table(f"draft model {report['directory']}", ("field", "value"), _fields(report["geometry"]))
    print_table("flags", ("flag", "value"), list(report["flags"].items()))
    print_table("capture", ("what", "found"), _fields(report["capture"]))
    print_table("draft vocabulary", ("what", "found"), _fields(report["draft_vocabulary"]))
    _print_parts(report["parts"])
    _print_download(report["download"])
    for note in report["notes"]:
        click.echo(f"note: {note}")


@command.command("tree", cls=SectionedCommand)
@click.argument("file", type=FILE, required=False)
@click.option("--chain", type=click.IntRange(1, MAX_SPECULATIVE_TOKENS), metavar="S", help="The chain of S drafts.")
@click.option("--batch", type=BATCH, default=RuntimeConfig.max_batch, show_default=True, metavar="N")
@click.option("--target", type=MODEL, metavar="DIR", help="Shapes are for this pair.  [default: the bundled one]")
@draft_model_option("Its draft model.")
@click.option("--what-if", is_flag=True, help="Recommend a tree and the limits it needs.")
@click.option(
    "--acceptance",
    type=FILE,
    metavar="FILE",
    help="With --what-if: JSON, for each depth the acceptance of each rank.",
)
@click.option(
    "--budgets", type=IntegerList(), default=DEFAULT_BUDGETS, metavar="T,T,..", help="Rows a slot to consider."
)
@click.option("--step-times-us", type=IntegerList(), metavar="N,N,..", help="Microseconds of a step, for each budget.")
@as_json
def tree(
    file: Path | None,
    chain: int | None,
    batch: int,
    target: Path | None,
    head: Path | None,
    what_if: bool,
    acceptance: Path | None,
    budgets: tuple[int, ...],
    step_times_us: tuple[int, ...] | None,
    json_output: bool,
) -> None:
    """Show the tree of FILE, a table of choices in YAML, TOML or JSON; or a chain."""
    if (target is None) != (head is None):
        raise click.UsageError("--target and --draft-model go together")
    if (acceptance is not None or step_times_us is not None) and not what_if:
        raise click.UsageError("--acceptance and --step-times-us need --what-if")
    if file is not None and chain is not None:
        raise click.UsageError("give FILE or --chain, not both")
    if file is None and chain is None and not what_if:
        raise click.UsageError("give FILE, --chain S or --what-if")
    report: dict[str, Any] = {}
    if file is not None or chain is not None:
        report |= tree_report(file, chain, batch, target or bundled("target"), head or bundled("head"))
    if what_if:
        pair = (target or bundled("target"), head or bundled("head"))
        report["what_if"] = what_if_report(acceptance, budgets, step_times_us, batch, *pair)
    if json_output:
        print_json(report)
        return
    if "nodes" in report:
        print_tree(report)
    if what_if:
        print_what_if(report["what_if"])


@command.command("run", cls=SectionedCommand)
@click.argument("model", type=MODEL, required=False)
@speculation_options
@click.option("--prompts", type=FILE, metavar="FILE", help="As `lowlat doctor` takes.  [default: bundled ones]")
@click.option("--num-prompts", type=click.IntRange(1, 256), default=4, show_default=True, help="Prompts to take.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens a prompt.")
@click.option("--chat", is_flag=True, help="Wrap the prompts in the model's chat template.")
@record_options(SamplingParams, "temperature", "seed", "max_draft_tokens")
@runtime_options
@as_json
@click.pass_context
def run(
    context: click.Context,
    /,
    model: Path | None,
    prompts: Path | None,
    num_prompts: int,
    chat: bool,
    json_output: bool,
    **values: Any,
) -> None:
    """Decode a few prompts with MODEL, and say whether multi-token speculation is active, or why it is not.

    MODEL is a directory or ORG/NAME; without one, it is the bundled pair. Exits with 0 where speculation is active,
    with 3 where it is not: no draft model, one that was refused, a depth or limit of 0, no draft verified, acceptance
    that is simulated or no better than guessing.
    """
    speculative = speculative_config(values, bundled("head") if model is None else None)
    params = SamplingParams(**given_options(values, SamplingParams))

    import msgspec

    from lowlat.cli.reports.activity import measure_activity
    from lowlat.cli.reports.shifts import read_prompts

    found = measure_activity(
        model or bundled("target"),
        speculative,
        read_prompts(prompts or bundled("prompts.json"), num_prompts),
        params,
        chat=chat,
        **{"max_context": None, **given_options(values, RuntimeConfig)},
    )
    if json_output:
        print_json(msgspec.to_builtins(found))
    else:
        _print_run(found)
    context.exit(0 if found.active else NOT_ACTIVE)


def _print_run(found: "Activity") -> None:
    guess = "unknown" if found.guess_rate is None else f"{found.guess_rate:.1%}"
    rows = [
        ["draft model", found.draft_model or "none"],
        ["device", f"{found.device} ({found.executor} executor)"],
        ["method, draft tokens a step", f"{found.method or 'none'}, {found.num_speculative_tokens}"],
        ["prompts, tokens decoded", f"{found.num_prompts}, {found.completion_tokens}"],
        ["steps, of which drafted", f"{found.num_steps}, {(found.eagle_speculation or {}).get('num_drafts', 0)}"],
        ["tokens/s", f"{found.tokens_per_s:.1f}"],
        ["tokens a drafted step", f"{found.mean_acceptance_length:.2f}"],
        ["acceptance by position", " ".join(f"{share:.1%}" for share in found.acceptance_by_position) or "none"],
        ["acceptance of guesses", guess],
    ]
    print_table(f"speculation of {found.model}", ("what", "found"), rows)
    click.echo(f"multi-token speculation is {'active' if found.active else 'NOT active'}")
    for reason in found.reasons:
        click.echo(f"because {reason.text}")
    for number, text in enumerate(found.texts, 1):
        click.echo(f"\nprompt {number}: ", nl=False)
        stream_text(str(text.prompt), dim=True)
        stream_text(f"{text.answer}\n")


@command.command("quality", cls=SectionedCommand)
@click.argument("model", type=MODEL, required=False)
@click.option("--text", type=FILE, required=True, metavar="FILE", help="UTF-8 text to predict; any length.")
@click.option(
    "--against",
    type=MODEL,
    metavar="MODEL",
    help="The target to compare with: the plain original of MODEL.  [default: MODEL itself, where --quantize or "
    "another way to store numbers is given]",
)
@click.option("--max-tokens", type=click.IntRange(2), metavar="N", help="The text's first tokens alone.")
@runtime_options
@json_file_option
def quality(
    model: Path | None, text: Path, against: Path | None, max_tokens: int | None, json_file: str | None, **values: Any
) -> None:
    """Measure what storing MODEL in fewer bits costs: perplexity, KL divergence by token and equal choices on a text.

    MODEL is a directory or ORG/NAME; without one, it is the bundled target. The text is cut into prompts of
    --max-context - 1 tokens, each read afresh; --dtype, --device and --executor hold for both targets, --quantize and
    its like for MODEL alone. Without anything to compare with, it is the perplexity of MODEL.
    """
    from lowlat.cli.reports.quality import print_quality, run_quality

    check_json_file(json_file)
    found = run_quality(model or bundled("target"), against, text, max_tokens, given_options(values, RuntimeConfig))
    if json_file is None:
        print_quality(found)
    else:
        write_json(json_file, found)


command.add_command(step)
_alias = copy(draft_model)
_alias.hidden = True
command.add_command(_alias, "head")
