"""`lowlat tune`: the plans of a pair's launches swept on this GPU, and the table that is written of them."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.console import print_json, print_table, progress_bar
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import STORED, IntegerList, as_json, bundled, given_options, record_options
from lowlat.cli.paths import MODEL, NEW_FILE, NEW_PATH
from lowlat.errors import ConfigError
from lowlat.options.method_options import AUTO_METHOD, METHOD_OPTIONS
from lowlat.options.runtime import MAX_BATCH, RuntimeConfig
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

if TYPE_CHECKING:
    from lowlat.tools.tune.estimates import Estimates
    from lowlat.tools.tune.pairs import Pair, Sizes
    from lowlat.tools.tune.run import Tuned
    from lowlat.tools.tune.shapes import Shape

__all__ = ["command"]

BUNDLED = "bundled"
WHAT = ("gemm", "experts", "attention", "all")
# without draft_model, whose draft model is tuned as a target
METHODS = [method for method in METHOD_OPTIONS if method not in (AUTO_METHOD, "draft_model")]
OPTIONS = (*STORED, "tensor_parallel_size", "tp_invariant", "prefill_chunk", "max_prefill_chunks", "forced_rows")


@click.command("tune", cls=SectionedCommand)
@click.argument("what", type=click.Choice(WHAT), default="all")
@click.option("--model", type=MODEL, metavar="MODEL", help="A target's directory or name.")
@click.option("--draft-model", "head", type=MODEL, metavar="MODEL", help="Its EAGLE3 draft model.")
@click.option(
    "--geometry",
    "geometries",
    metavar="NAME,NAME",
    help="Published shapes, as `lowlat bench run` knows them; `bundled`: the bundled pair.  [default: bundled, without "
    "--model]",
)
@click.option("--method", type=click.Choice(METHODS), help="Of a published shape's drafts, or of a target's own.")
@click.option(
    "--draft-vocabulary",
    type=click.Choice(["cut", "whole", "both"]),
    default="cut",
    metavar="IDS",
    help="Ids drafted: cut (the shape's), whole or both.  [default: cut]",
)
@record_options(RuntimeConfig, *OPTIONS)
@record_options(SpeculativeConfig, "draft_quantize", "draft_tensor_parallel_size")
@click.option(
    "--batch",
    type=IntegerList(),
    default=(8,),
    metavar="N,N",
    help="Slots of runtimes (max_batch), and fewer.  [default: 8]",
)
@click.option(
    "-S",
    "--num-speculative-tokens",
    "depths",
    type=IntegerList(),
    default=tuple(range(MAX_SPECULATIVE_TOKENS + 1)),
    metavar="N,N",
    help="Depths of speculation.  [default: all]",
)
@click.option(
    "--candidates",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="Plans of a launch that are timed, the derived one included.",
)
@click.option(
    "--budget-s", type=click.FloatRange(1), default=180.0, show_default=True, help="Seconds, compiling included."
)
@click.option("--missing", is_flag=True, help="Leave out what the tables (or --out's file) have already.")
@click.option(
    "--tiles",
    is_flag=True,
    help="With --list: the tiles of positions that attention walks, by context; no GPU needed.",
)
@click.option("--list", "only_list", is_flag=True, help="Show launches and plans; needs no GPU.")
@click.option(
    "--compile",
    "only_compile",
    is_flag=True,
    help="Compile the plans' kernels into LOWLAT_KERNEL_CACHE; needs no GPU.",
)
@click.option(
    "--gpu",
    "--card",
    "card",
    default="NVIDIA H200",
    show_default=True,
    metavar="NAME",
    help="With --compile or --list: for which GPU.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cuda or cuda:N.")
@click.option(
    "--out", type=NEW_PATH, metavar="FILE", help="The table.  [default: this GPU's among the user's own tables]"
)
@click.option("--times", type=NEW_FILE, metavar="FILE", help="Write the times of all plans, too.")
@click.option("--commit", default="", help="What is measured, where git has no checkout.")
@as_json
def command(
    what: str,
    model: Path | None,
    head: Path | None,
    geometries: str | None,
    method: str | None,
    only_list: bool,
    only_compile: bool,
    tiles: bool,
    json_output: bool,
    **values: Any,
) -> None:
    """Time the plans of every launch of a pair that a GPU cuts, and write this GPU's table of the fastest.

    Every GEMM, attention and MoE layer of all buckets and of prefill is met by its shape. A plan changes no
    bit of a result. Runtimes on this GPU take their plans from the table; without one they are derived from the GPU's
    sizes. Launches that steps have most of come first, and each is written as it is timed. What the budget does not
    allow, or a run that is broken off, is left out: `--missing` goes on with it.

    With --tensor-parallel the launches are those of a rank, timed on one GPU: what it would send to peers comes back
    to it, so nothing waits for another GPU.
    """
    if head is not None and model is None:
        raise click.UsageError("--draft-model needs --model")
    if values["draft_quantize"] and model is not None and head is None and not geometries:
        raise click.UsageError("--draft-quantize needs a draft model to round: --draft-model")
    if method is not None and head is not None:
        raise click.UsageError("a draft model's directory tells its own method; leave --method out")
    if method is not None and model is None and not geometries:
        raise click.UsageError("--method needs --model or --geometry")
    if tiles and not only_list:
        raise click.UsageError("--tiles needs --list")
    if only_list and only_compile:
        raise click.UsageError("--list and --compile are for one of them")
    from lowlat.tools.tune.pairs import Sizes, cut_pair, rounded_pair, sizes_of

    options = RuntimeConfig(**given_options({name: values[name] for name in OPTIONS}, RuntimeConfig))
    slots, depths = values["batch"], values["depths"]
    if not slots or min(slots) < 1 or max(slots) > MAX_BATCH or min(depths, default=-1) < 0:
        raise click.UsageError(f"--batch takes slots from 1 to {MAX_BATCH}, -S depths from 0 on")
    common = Sizes(
        depths=depths, prefill_chunk=options.prefill_chunk, max_prefill_chunks=options.max_prefill_chunks,
        forced_rows=options.forced_rows,
    )  # fmt: skip
    sizes = sizes_of(slots, common)
    with tempfile.TemporaryDirectory(prefix="lowlat-tune-") as scratch:
        pairs = [
            cut_pair(
                rounded_pair(pair, options, values["draft_quantize"]), options, values["draft_tensor_parallel_size"]
            )
            for pair in _pairs(model, head, geometries, method, values["draft_vocabulary"], Path(scratch))
        ]
        if only_list:
            _list(what, pairs, sizes, values, tiles=tiles, json_output=json_output)
        elif only_compile:
            _compile(what, pairs, sizes, values, json_output=json_output)
        else:
            _tune(what, pairs, sizes, values, json_output=json_output)


def _pairs(
    model: Path | None, head: Path | None, geometries: str | None, method: str | None, vocabulary: str, scratch: Path
) -> list["Pair"]:
    from lowlat.cli.models import local_draft_model, local_target
    from lowlat.tools.tune.pairs import open_pair, random_pair

    pairs = []
    if model is not None:
        target = local_target(model)
        pairs.append(open_pair(target, None if head is None else local_draft_model(head, target), method=method))
    for name in (geometries or ("" if pairs else BUNDLED)).replace(",", " ").split():
        if name == BUNDLED:
            pairs.append(open_pair(bundled("target"), bundled("head")))
        else:
            wanted = ("cut", "whole") if vocabulary == "both" else (vocabulary,)
            pairs += [random_pair(name, scratch / name, method or "eagle3", whole=each == "whole") for each in wanted]
    return pairs


def _list(
    what: str,
    pairs: Sequence["Pair"],
    sizes: Sequence["Sizes"],
    values: dict[str, Any],
    *,
    tiles: bool,
    json_output: bool,
) -> None:
    from lowlat.tools.gpus import describe_gpu
    from lowlat.tools.tune.estimates import Estimates
    from lowlat.tools.tune.run import by_use, counted, known_plans, lacking, listed

    estimates = Estimates(values["candidates"])
    gpu, only_missing = describe_gpu(values["card"]), values["missing"]
    name, facts = gpu.name, gpu.facts
    shapes = every = listed(pairs, what, sizes, facts)
    if only_missing:
        shapes = lacking(every, known_plans(gpu.name, gpu.facts, values["out"]))
    shapes = by_use(shapes)
    walked = counted(shapes, facts) if tiles else []
    if json_output:
        found: dict[str, Any] = {
            "shapes": [_shape(shape, values["candidates"], estimates) for shape in shapes],
            "timing_s": round(sum(map(estimates.timing_s, shapes)), 1),
            "by_kind": _counts(shapes, every),
        }
        if only_missing:
            found["num_launches"] = len(every)
        if tiles:
            found["tiles"] = [each.to_dict() for each in walked]
        print_json({"card": name, **found})
        return
    rows = [
        (
            shape.kind,
            shape.key,
            ", ".join(shape.stages),
            f"{shape.uses:.0f}",
            len(shape.candidates),
            f"{estimates.timing_s(shape):.1f}",
            _knobs(shape.candidates[0].knobs),
        )
        for shape in shapes
    ]
    names = ", ".join(pair.name for pair in pairs)
    title = f"{len(shapes)} launches of {names}, as cut for an {name}"
    if only_missing:
        by_kind = ", ".join(f"{kind} {few} of {all_}" for kind, (few, all_) in _counts(shapes, every).items())
        title = f"{len(shapes)} of {len(every)} launches of {names} have no entry in the tables of an {name}: {by_kind}"
    columns: tuple[str, ...] = ("kind", "shape", "stages", "uses", "plans", "s", "derived plan")
    print_table(title, columns, rows)
    click.echo(f"some {sum(map(estimates.timing_s, shapes)):.0f} s to time them, their kernels' compiling left out")
    if tiles:
        counts = [tuple(each.to_dict().values()) for each in walked]
        columns = ("shape", "context", "row tiles", "total", "empty", "masked", "executed")
        print_table("tiles of 64 positions that attention walks, of chains", columns, counts)


def _counts(shapes: Sequence["Shape"], every: Sequence["Shape"]) -> dict[str, tuple[int, int]]:
    """By kind, how many launches there are of so many."""
    few, whole = (Counter(shape.kind for shape in each) for each in (shapes, every))
    return {kind: (few[kind], count) for kind, count in whole.items()}


def _shape(shape: "Shape", num_candidates: int, estimates: "Estimates") -> dict[str, Any]:
    plans = [dict(plan.knobs) for plan in shape.candidates[:num_candidates]]
    return {
        "kind": shape.kind,
        "key": shape.key,
        "stages": shape.stages,
        "uses": round(shape.uses, 2),
        "timing_s": round(estimates.timing_s(shape), 2),
        "num_plans": len(shape.candidates),
        "plans": plans,
    }


def _compile(
    what: str, pairs: Sequence["Pair"], sizes: Sequence["Sizes"], values: dict[str, Any], *, json_output: bool
) -> None:
    from lowlat.options.directories import kernel_cache_directory
    from lowlat.tools.gpus import describe_gpu
    from lowlat.tools.tune.run import compile_plans_of, known_plans

    gpu, directory = describe_gpu(values["card"]), kernel_cache_directory()
    done = compile_plans_of(
        pairs,
        what,
        sizes,
        gpu.facts,
        directory,
        num_candidates=values["candidates"],
        known=known_plans(gpu.name, gpu.facts, values["out"]) if values["missing"] else None,
        bar=progress_bar,
    )
    if json_output:
        print_json({"card": gpu.name, "directory": str(directory), **asdict(done)})
    else:
        click.echo(
            f"{done.kernels} kernels of {done.launches} launches for {gpu.name} in {directory}, "
            f"{done.compiled} of them compiled now"
        )


def _tune(
    what: str, pairs: Sequence["Pair"], sizes: Sequence["Sizes"], values: dict[str, Any], *, json_output: bool
) -> None:
    from lowlat.executors.devices import choose_device
    from lowlat.tools.tune.run import tune

    choice = choose_device(values["device"], "auto")
    if not choice.has_kernels:
        raise ConfigError(f"lowlat tune needs an NVIDIA GPU ({choice.reason}); --list needs none")
    tuned = tune(
        pairs,
        what,
        sizes,
        choice.device,
        num_candidates=values["candidates"],
        budget_s=values["budget_s"],
        only_missing=values["missing"],
        out=values["out"],
        times=values["times"],
        commit=values["commit"],
        bar=progress_bar,
    )
    if not json_output:
        _show(tuned)
    print_json(_summary(tuned))


def _show(tuned: "Tuned") -> None:
    rows = [
        (
            each.shape.kind,
            each.shape.key,
            ", ".join(each.shape.stages),
            f"{each.default_us:.2f}",
            f"{each.best_us:.2f}",
            f"{each.gain:.1%}",
            _knobs(each.plan.knobs),
        )
        for each in tuned.swept
    ]
    columns = ("kind", "shape", "stages", "derived, us", "best, us", "gain", "plan")
    print_table(f"{len(rows)} launches on {tuned.gpu_name}, {tuned.seconds:.0f} s", columns, rows)
    if tuned.left:
        click.echo(
            f"{len(tuned.left)} launches were left out, of some {tuned.left_s:.0f} s: --missing goes on with them"
        )
    click.echo(f"{tuned.path} has {len(tuned.table)} plans")


def _summary(tuned: "Tuned") -> dict[str, Any]:
    gains = [each.gain for each in tuned.swept]
    return {
        "card": tuned.gpu_name,
        "table": str(tuned.path),
        "entries": len(tuned.table),
        "timed": len(tuned.swept),
        "left_out": len(tuned.left),
        "left_out_s": round(tuned.left_s, 1),
        "faster_than_derived": sum(gain > 0 for gain in gains),
        "largest_gain": max(gains, default=0.0),
        "beyond_3_percent": sum(gain > 0.03 for gain in gains),
        "seconds": round(tuned.seconds, 1),
    }


def _knobs(knobs: Any) -> str:
    return " ".join(f"{name}={int(value)}" for name, value in knobs.items())
