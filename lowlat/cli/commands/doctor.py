"""`lowlat doctor`: the environment, a draft model's capture boundaries, and the proof of exactness and fidelity."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.collection import rare_collections
from lowlat.cli.console import format_bytes, print_json, print_table
from lowlat.cli.options import as_json, bundled, draft_model_option, has_bundled, record_options
from lowlat.cli.paths import FILE, MODEL, NEW_FILE
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from lowlat.cli.reports.shifts import ShiftResult
    from lowlat.options.limits import LimitCheck

__all__ = ["command"]

NO_PAIR = (
    "no pair was checked: --target names none, and the demo models are not installed (`pip install "
    "lowlat-demo-models`, or from a checkout ./lowlat/demo)"
)


@click.command("doctor")
@click.option("--target", type=MODEL, metavar="MODEL", help="A target.  [default: the bundled pair]")
@draft_model_option("Its draft model.  [default: the target's own MTP layer]")
@click.option(
    "--prompts",
    type=FILE,
    metavar="FILE",
    help="A prompt a line; or .json: prompts or lists of token ids.  [default: the bundled prompts]",
)
@click.option("--num-prompts", type=click.IntRange(1, 256), default=8, show_default=True, help="Prompts to take.")
@click.option("--max-tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens a prompt.")
@click.option("--chat", is_flag=True, help="Wrap the prompts in the target's chat template.")
@click.option(
    "--exactness", is_flag=True, help="Compare answers with plain decoding, in every way that drafts are made."
)
@click.option("--fidelity", is_flag=True, help="Compare with transformers: which is closer to float32?")
@click.option(
    "-S",
    "--num-speculative-tokens",
    "depth",
    type=click.IntRange(1, MAX_SPECULATIVE_TOKENS),
    default=3,
    show_default=True,
    help="With these two: the longest draft length.",
)
@click.option("--out", type=NEW_FILE, metavar="FILE", help="With these two: add the report to a JSON file.")
@record_options(RuntimeConfig, "device", filled=True)
@click.option("--environment-only", is_flag=True, help="Load no model.")
@as_json
def command(
    target: Path | None,
    head: Path | None,
    prompts: Path | None,
    num_prompts: int,
    max_tokens: int,
    chat: bool,
    exactness: bool,
    fidelity: bool,
    depth: int,
    out: Path | None,
    device: str,
    environment_only: bool,
    json_output: bool,
) -> None:
    """Check this machine, and measure how often the first draft is accepted under shifted capture boundaries.

    Exit code 1 when another shift than 0 is best: the draft model then reads the wrong residual streams. In place of
    it, with --exactness: exit code 1 when an answer differs from plain decoding; with --fidelity: when distributions
    are not shown to be as close to float32 as those of transformers in bfloat16.
    """
    if target is None and head is not None:
        raise click.UsageError("--draft-model goes with its --target")
    proves = exactness or fidelity
    if out is not None and not proves:
        raise click.UsageError("--out goes with --exactness or --fidelity")

    with rare_collections():
        from lowlat.cli.reports.environment import environment

        report = environment()
        report["peers"] = _peers()
    if not json_output:
        _print_environment(report)
    report["healthy"] = True
    if target is None and not proves and not has_bundled("target"):
        report["unchecked"] = NO_PAIR
    elif not environment_only:
        options = {"max_tokens": max_tokens, "chat": chat, "device": device}
        pair = _Pair.open(target, head, prompts, num_prompts, options)
        if proves:
            from lowlat.cli.reports.exactness import Proof
            from lowlat.tools.exactness import check_positions
            from lowlat.tools.transformers_model import transformers_version

            if fidelity:  # before exactness, which takes minutes
                check_positions(len(pair.prompts) * max_tokens)
                transformers_version()
            proof = Proof(pair.target, pair.draft_model, pair.prompts, depth, out=out, **pair.options)
            if exactness:
                proof.check_exactness(shown=not json_output)
            if fidelity:
                proof.check_fidelity(shown=not json_output)
            report |= {**proof.to_dict(), "healthy": proof.holds}
            proof.write(report)
        else:
            report |= _check_boundaries(pair, shown=not json_output)
    if json_output:
        print_json(report)
    elif "unchecked" in report:
        click.echo(report["unchecked"])
    if not report["healthy"]:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class _Pair:
    """A target's directory and its draft model's, and the prompts that they are checked with.

    options  max_tokens, chat and device
    """

    target: Path
    draft_model: Path | None
    prompts: "list[Any]"
    options: dict[str, Any]

    @classmethod
    def open(
        cls, target: Path | None, head: Path | None, prompts: Path | None, num_prompts: int, options: dict[str, Any]
    ) -> "_Pair":
        """The pair that is named, or the bundled one. Raises ConfigError."""
        with rare_collections():
            from lowlat.cli.models import local_draft_model, local_target
            from lowlat.cli.reports.shifts import read_prompts

        directory = local_target(target or bundled("target"))
        head = bundled("head") if target is None else head
        draft_model = None if head is None else local_draft_model(head, directory)
        return cls(directory, draft_model, read_prompts(prompts or bundled("prompts.json"), num_prompts), options)


def _check_boundaries(pair: _Pair, *, shown: bool) -> dict[str, Any]:
    """The report's part on capture boundaries, and on options next to what was loaded."""
    from lowlat.cli.reports.shifts import measure_shifts, unshifted_is_best

    results, checks = measure_shifts(pair.target, pair.draft_model, pair.prompts, **pair.options)
    healthy = unshifted_is_best(results)
    verdict = _verdict(results, healthy)
    if shown:
        _print_shifts(results, verdict)
        _print_limits(checks)
    return {
        "capture_shifts": [result.to_dict() for result in results],
        "limits": [asdict(check) for check in checks],
        "verdict": verdict,
        "healthy": healthy,
    }


def _print_environment(report: dict[str, Any]) -> None:
    rows = [[name, version or "not installed"] for name, version in report["versions"].items()]
    print_table("versions", ("package", "version"), rows)
    device, gpu, cpu = report["device"], report["gpu"], report["cpu"]
    memory = cpu["available_bytes"]
    rows = [
        ["device", f"{device['chosen']} ({device['executor']} executor): {device['reason']}"],
        ["NVIDIA GPU", "present" if gpu["present"] else "none"],
        ["driver", gpu["driver"] or "none"],
        ["torch's CUDA", gpu["torch_cuda"] or "built without"],
        *(
            [
                f"GPU {index}",
                f"{device['name']}, capability {device['capability']}, {format_bytes(device['memory_bytes'])}",
            ]
            for index, device in enumerate(gpu["devices"])
        ),
        ["CPU cores", f"{cpu['usable_cores']} usable of {cpu['logical_cores']}; torch uses {cpu['torch_threads']}"],
        ["memory available", "unknown" if memory is None else format_bytes(memory)],
        ["cache", report["cache"]],
        ["compiled kernels", _kernel_cache(**report["kernel_cache"])],
    ]
    print_table("machine", ("what", "found"), rows)
    if report["gpu"]["devices"]:
        print_table("several GPUs", ("what", "found"), _peer_rows(report["peers"]))


def _kernel_cache(path: str, problem: str | None) -> str:
    """The folder of compiled kernels, and what to do where it cannot be written."""
    if problem is None:
        return path
    return (
        f"{path}, which cannot be written: {problem}. Kernels that it lacks are compiled at every start: let "
        "LOWLAT_KERNEL_CACHE name a folder of your own, with space"
    )


def _peers() -> dict[str, Any]:
    """The paths between GPUs; nothing is loaded for them where there is no GPU."""
    from lowlat.executors.devices import nvidia_gpu_present

    if not nvidia_gpu_present():
        return {"cards": 0, "problem": None, "exchange": [], "write_gb_s": {}}
    from lowlat.tools.all_reduce_times import topology

    return topology()


def _peer_rows(peers: dict[str, Any]) -> list[list[str]]:
    if peers["cards"] < 2:
        return [["cards", "one: tensor_parallel_size is 1, and nothing is exchanged"]]
    if peers["problem"] is not None:
        return [["cards", str(peers["cards"])], ["problem", peers["problem"]]]
    return [
        ["cards", f"{peers['cards']}, each reaches all others"],
        *(
            [
                f"exchange of {each['rows']} x {each['width']}, {each['ranks']} ranks",
                f"{each['add_us']} us with the residual added, {each['norm_us']} us normed, too: that takes "
                f"{each['local_us']} us where nothing is exchanged",
            ]
            for each in peers["exchange"]
        ),
        *([f"copies, {pair}", f"{speed} GB/s"] for pair, speed in peers["write_gb_s"].items()),
    ]


def _verdict(results: "list[ShiftResult]", healthy: bool) -> str:
    rates = {result.shift: result.acceptance for result in results}
    measured = {shift: rate for shift, rate in rates.items() if rate is not None}
    if rates[0] is None:
        return "no draft was verified: nothing can be said; take more prompts or tokens"
    if healthy and not results[0].boundaries:
        return f"the draft model reads tokens alone: {rates[0]:.1%} of the first drafts are accepted"
    if healthy:
        return f"the capture boundaries are right: no shift accepts more than {rates[0]:.1%} of the first drafts"
    best = max(measured, key=lambda shift: measured[shift])
    found = next(result for result in results if result.shift == best)
    return (
        f"the capture boundaries are off by {best:+d}: {measured[best]:.1%} against {rates[0]:.1%} of the first "
        f"drafts; use --capture-layers {','.join(map(str, found.boundaries))}"
    )


def _print_limits(checks: "list[LimitCheck]") -> None:
    def shown(value: Any) -> str:
        return "" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    rows = [[check.name, shown(check.asked), shown(check.loaded), check.verdict] for check in checks]
    print_table("speculation by default next to what was loaded", ("option", "asked", "loaded", ""), rows)


def _print_shifts(results: "list[ShiftResult]", verdict: str) -> None:
    rows = [
        [
            f"{result.shift:+d}" if result.shift else "0",
            ", ".join(map(str, result.boundaries)),
            "not run: no boundary can move" if result.drafted is None else f"{result.accepted} of {result.drafted}",
            "" if result.acceptance is None else f"{result.acceptance:.1%}",
        ]
        for result in results
    ]
    columns = ("shift", "boundaries", "accepted first drafts", "share")
    print_table("first-position acceptance under shifted capture boundaries", columns, rows)
    click.echo(verdict)
