"""`lowlat inspect step`: a step's operations, fusions, launches, bytes and buffers, on a machine that needs no GPU."""

from pathlib import Path
from typing import Any

import click

from lowlat.cli.collection import rare_collections
from lowlat.cli.console import print_json
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import (
    STORED,
    as_json,
    given_options,
    record_options,
    speculation_options,
)
from lowlat.cli.paths import check_model
from lowlat.options.runtime import MAX_BATCH, RuntimeConfig

__all__ = ["step"]

SIZING = (
    *("max_batch", "max_context", "dtype", *STORED, "block_size", "prefill_chunk", "max_prefill_chunks"),
    *("kv_cache_gib", "kv_blocks", "tensor_parallel_size", "tp_invariant"),
)


class _ModelOrPreset(click.ParamType[Path]):
    """A directory, ORG/NAME, or the name of a published shape."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return it as a path; a preset's is its name. Raises ConfigError for what is neither."""
        path = Path(value)
        if not path.exists():
            with rare_collections():
                from lowlat.tools.planned_step import preset_names

            if str(value) in preset_names():
                return path
        check_model(path)
        return path


@click.command("step", cls=SectionedCommand)
@click.argument("model", type=_ModelOrPreset(), required=False)
@click.option("--gpu", default="h200", show_default=True, metavar="NAME", help="h200, h100, a100, b200 or rtx5090.")
@click.option(
    "--batch", type=click.IntRange(1, MAX_BATCH), default=1, show_default=True, metavar="N", help="Active slots."
)
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens of each request when the step runs.  [default: 1024, or what fits]",
)
@click.option("--spec-tokens", type=click.IntRange(0), metavar="N", help="-S by another name.")
@click.option("--full", is_flag=True, help="Show every operation, kernel and buffer.")
@speculation_options
@record_options(RuntimeConfig, *SIZING)
@as_json
@rare_collections()
def step(
    model: Path | None,
    gpu: str,
    batch: int,
    context: int | None,
    spec_tokens: int | None,
    full: bool,
    json_output: bool,
    **values: Any,
) -> None:
    """Show the operations of a decode step and of prefill, the kernels that cover them, and the bytes that they move.

    MODEL is a directory, ORG/NAME, or a published shape such as llama-8b or gpt-oss-120b, which has a draft model of
    its own; without one, it is the bundled pair. Configs and headers are read, and no weight; no GPU is needed.
    """
    if spec_tokens is not None:
        if values["num_speculative_tokens"] is not None:
            raise click.UsageError("--spec-tokens and -S are one option: give one of them")
        values["num_speculative_tokens"] = spec_tokens

    from lowlat.cli.reports.inspected_step import inspect_step
    from lowlat.cli.reports.step_tables import print_step

    options = given_options({name: values[name] for name in SIZING}, RuntimeConfig)
    report = inspect_step(model, values, options, gpu=gpu, batch=batch, context=context, full=full)
    if json_output:
        print_json(report)
    else:
        print_step(report, full=full)
