"""`lowlat compile`: the kernels of a model compiled ahead, for a GPU that need not be there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lowlat.cli.console import print_json, progress_bar
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import (
    STORED,
    as_json,
    bundled,
    given_options,
    record_options,
    speculation_options,
    speculative_config,
)
from lowlat.cli.paths import MODEL, NEW_FOLDER, check_new_folder
from lowlat.options.runtime import RuntimeConfig

__all__ = ["command"]

SIZING = (
    *("max_batch", "max_context", "dtype", *STORED, "block_size", "prefill_chunk", "max_prefill_chunks"),
    *("kv_cache_gib", "kv_blocks", "device_loop", "tensor_parallel_size", "tp_invariant"),
)


@click.command("compile", cls=SectionedCommand)
@click.argument("model", type=MODEL, required=False)
@speculation_options
@record_options(RuntimeConfig, *SIZING)
@click.option(
    "--gpu",
    "--card",
    "gpu",
    default="NVIDIA H200",
    show_default=True,
    metavar="NAME",
    help="By its driver, or h200, h100, a100, b200, rtx5090.",
)
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes.  [default: one for each core]")
@click.option("--out", type=NEW_FOLDER, metavar="DIR", help="[default: LOWLAT_KERNEL_CACHE, or the user's cache]")
@click.option("--list", "only_list", is_flag=True, help="Show the kernels and compile none.")
@as_json
def command(
    model: Path | None,
    gpu: str,
    workers: int | None,
    out: Path | None,
    only_list: bool,
    json_output: bool,
    **values: Any,
) -> None:
    """Compile the kernels that serving MODEL with these options takes; by default the bundled pair's.

    It needs no GPU: a machine that has one finds them in the directory that LOWLAT_KERNEL_CACHE names, where the
    package and its compilers have the same versions, and starts without compiling. Options of a runtime decide which
    kernels it has: give those that it will be given.
    """
    from lowlat.cli.models import local_draft_model, local_target
    from lowlat.cli.running import default_context
    from lowlat.executors.launcher import check_compilers
    from lowlat.options.directories import kernel_cache_directory, tuning_directory
    from lowlat.tools.gpus import describe_gpu
    from lowlat.tools.precompile import compile_all, kernels_of

    directory = kernel_cache_directory() if out is None else out
    if not only_list:
        check_new_folder(directory)
    described = describe_gpu(gpu, tuning_directory())
    speculative = speculative_config(values, bundled("head") if model is None else None)
    target = bundled("target") if model is None else local_target(model)
    if speculative is not None and speculative.model is not None:
        speculative = replace(speculative, model=local_draft_model(Path(str(speculative.model)), target))
    given = given_options({name: values[name] for name in SIZING}, RuntimeConfig)
    options = RuntimeConfig(**{**given, "max_context": default_context(target, values["max_context"])})
    if not only_list:
        check_compilers()
    kernels = kernels_of(target, speculative, options, described.facts)
    if only_list:
        if json_output:
            print_json({"card": described.name, "kernels": sorted(kernels)})
        else:
            click.echo("\n".join(sorted(kernels)))
        return
    with progress_bar("compiling") as update:
        lacking = compile_all(kernels, described.facts, directory, workers, update)
    if json_output:
        print_json({"card": described.name, "directory": str(directory), "kernels": len(kernels), "compiled": lacking})
    else:
        click.echo(f"{len(kernels)} kernels for {described.name} in {directory}, {lacking} of them compiled now")
