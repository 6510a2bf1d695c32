"""`lowlat profile`: the time of a decode step by stage and by kernel, next to the bytes that it must move."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.console import format_bytes, print_json, print_table, progress_bar
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import as_json, bundled, record_options, speculation_options, speculative_config
from lowlat.cli.paths import MODEL, NEW_FILE
from lowlat.errors import ConfigError
from lowlat.options.model_names import display_name
from lowlat.options.runtime import MAX_BATCH, RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from lowlat.executors.devices import DeviceChoice
    from lowlat.tools.profile.recording import GpuRow, Profile
    from lowlat.tools.profile.report import Summary

__all__ = ["command"]

SHOWN_KERNELS = 12
STAGE_COLUMNS = ("stage", "us a step", "share", "launches", "bytes", "GB/s", "of the wall", "")
GPU_COLUMNS = ("GPU", "us a step", "all-reduces alone, us", "products that exchange, us", "idle")
KERNEL_COLUMNS = ("kernel", "stage", "us a step", "share", "launches", "us each, overlaps included", "of the wall")


@click.command("profile", cls=SectionedCommand)
@click.argument("model", type=MODEL, required=False)
@speculation_options
@click.option(
    "--batch", type=click.IntRange(1, MAX_BATCH), default=1, show_default=True, help="Requests that decode together."
)
@click.option(
    "--context",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Tokens of each prompt; fewer where the model's end is near.",
)
@click.option("--steps", type=click.IntRange(1, 1000), default=10, show_default=True, help="Steps to record.")
@click.option("--trace", type=NEW_FILE, metavar="FILE", help="Write the steps as a trace for ui.perfetto.dev.")
@click.option("--device", default=RuntimeConfig.device, show_default=True, help="auto, cuda or cuda:N.")
@record_options(RuntimeConfig, "tensor_parallel_size", "devices")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Compute dtype; auto is the checkpoint's.",
)
@click.option(
    "--executor",
    type=click.Choice(["graph", "eager"]),
    default="graph",
    show_default=True,
    help="How steps are run: replayed, or launched one by one.",
)
@as_json
def command(model: Path | None, trace: Path | None, json_output: bool, **values: Any) -> None:
    """Record decode steps of MODEL on an NVIDIA GPU and show where their time goes; by default the bundled pair's.

    Prompts are random tokens: their text means nothing. A stage's time is by how much its kernels move on the latest
    end so far, so that stages add up to the step although kernels overlap. The wall is what the GPU's memory
    delivers to a kernel that only reads, measured in the same run. Of several GPUs (--tensor-parallel) stages and
    kernels are the first one's, and a table has what each exchanges.
    """
    from lowlat.tools.profile.recording import choose_gpu

    speculative = speculative_config(values, bundled("head") if model is None else None)
    named = values["devices"]
    gpu = choose_gpu(f"cuda:{named[0]}" if named else values["device"], values["executor"])
    if trace is not None and not trace.resolve().parent.is_dir():
        raise ConfigError(f"the trace cannot be written: there is no directory {trace.resolve().parent}")
    profile, conditions = _profile(bundled("target") if model is None else model, speculative, gpu, values)
    if trace is not None:
        from lowlat.tools.profile.trace import write_trace

        write_trace(trace, profile.steps, f"lowlat, {conditions['model']}, {profile.bucket}", profile.range_names)
        click.echo(f"trace of {len(profile.steps)} steps in {trace}: open it in ui.perfetto.dev", err=True)
    if json_output:
        print_json({**conditions, **profile.to_dict()})
    else:
        _show(profile, conditions)


def _profile(
    model: Path, speculative: SpeculativeConfig | None, gpu: "DeviceChoice", values: dict[str, Any]
) -> tuple["Profile", dict[str, Any]]:
    """The profile and what it was made with. Raises ConfigError, or LowlatError for a recording that is not whole."""
    from lowlat.cli.models import local_target
    from lowlat.cli.running import load_runtime
    from lowlat.models.target import read_model_config
    from lowlat.tools.profile import recording as profiling

    model = local_target(model, values["dtype"])
    config = read_model_config(model)
    room = profiling.find_room(
        values["context"],
        config.max_context,
        batch=values["batch"],
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        num_steps=values["steps"],
        prefill_chunk=RuntimeConfig.prefill_chunk,
    )
    if room.prompt_length < values["context"]:
        click.echo(
            f"prompts of {room.prompt_length} tokens, not {values['context']}: the model has {config.max_context} "
            f"positions and the steps need {room.max_tokens}",
            err=True,
        )
    wall = profiling.gpu_wall(gpu.device)
    wanted = ("device", "dtype", "executor", "tensor_parallel_size", "devices")
    options = {name: values[name] for name in wanted if values[name] not in (None, ())}
    with load_runtime(model, speculative, room.max_context, max_batch=values["batch"], **options) as runtime:
        prompts = profiling.random_prompts(config.vocab_size, values["batch"], room.prompt_length)
        with progress_bar("prefill") as update:
            lengths = profiling.start_decoding(runtime, prompts, room.max_tokens, update)
        profile = profiling.profile_steps(runtime, lengths, values["steps"], wall)
    conditions = {
        "model": display_name(model),
        "device": str(gpu.device),
        "card": profiling.gpu_name(gpu.device),
        "executor": values["executor"],
        "tensor_parallel_size": options.get("tensor_parallel_size", 1),
        "wall_gb_per_s": wall,
    }
    return profile, conditions


def _show(profile: "Profile", conditions: dict[str, Any]) -> None:
    _show_stages(profile, conditions)
    _show_kernels(profile.summary)
    if profile.gpus:
        _show_gpus(profile.gpus)
    summary, idle = profile.summary, profile.summary.idle
    click.echo(
        "bytes: weights, of experts those chosen, keys and values that must be read; "
        f"wall: {conditions['wall_gb_per_s']:.0f} GB/s\n"
        f"steps took {summary.min_step_us:.1f} to {summary.max_step_us:.1f} us on the device; without the profiler "
        f"{profile.host_us:.1f} us by the host's clock, its own work included\n"
        f"idle: no kernel ran for {idle.share:.1%} of {idle.span_us:.0f} us; between steps {idle.between_us:.0f} us, "
        f"within them {max(0.0, idle.idle_us - idle.between_us):.0f} us"
    )


def _show_stages(profile: "Profile", conditions: dict[str, Any]) -> None:
    summary, contexts, size = profile.summary, profile.contexts, conditions["tensor_parallel_size"]
    rows = [
        (
            row.stage,
            _number(row.time_us, ".1f"),
            _number(row.share, ".1%"),
            str(row.num_launches) if row.within is None else "",
            format_bytes(row.moved_bytes) if row.moved_bytes else "",
            _number(row.gb_per_s, ".0f"),
            _number(row.share_of_wall, ".1%"),
            "" if row.within is None else f"done by kernels of {row.within}",
        )
        for row in summary.stages
    ]
    total = (
        *("the step", f"{summary.step_us:.1f}", "", str(summary.num_launches), format_bytes(summary.moved_bytes)),
        *(_number(summary.gb_per_s, ".0f"), _number(summary.share_of_wall, ".1%"), ""),
    )
    around = f"{min(contexts)}" if min(contexts) == max(contexts) else f"{min(contexts)} to {max(contexts)}"
    gpus = conditions["card"] if size == 1 else f"{size} x {conditions['card']}"
    title = (
        f"{conditions['model']} on {gpus}, {conditions['executor']} executor: {profile.bucket}, "
        f"context {around}, means over {summary.num_steps} steps"
    )
    print_table(title, STAGE_COLUMNS, _to_the_right([*rows, total], 1, 7))


def _show_kernels(summary: "Summary") -> None:
    kernels = [
        (
            row.kernel,
            row.stage,
            f"{row.time_us:.1f}",
            f"{row.share:.1%}",
            str(row.num_launches),
            f"{row.duration_us:.1f}",
            _number(row.share_of_wall, ".1%"),
        )
        for row in summary.kernels[:SHOWN_KERNELS]
    ]
    left = len(summary.kernels) - len(kernels)
    more = f"; {left} more with --json" if left else ""
    print_table(f"kernels that take most{more}", KERNEL_COLUMNS, _to_the_right(kernels, 2, 7))


def _show_gpus(gpus: "Sequence[GpuRow]") -> None:
    times = [(each.step_us, each.all_reduce_us, each.fused_us) for each in gpus]
    rows = [
        (each.device, *(f"{us:.1f}" for us in row), f"{each.idle_share:.1%}")
        for each, row in zip(gpus, times, strict=True)
    ]
    print_table("what GPUs exchange, waits for slower ones included", GPU_COLUMNS, _to_the_right(rows, 1, 5))


def _to_the_right(rows: Sequence[tuple[str, ...]], first: int, end: int) -> list[tuple[str, ...]]:
    """The rows with the cells of columns [first, end) as wide as the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        tuple(
            cell.rjust(width) if first <= place < end else cell
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
