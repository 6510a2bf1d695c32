"""This module prints the tables of `lowlat inspect step`: a step and a prefill pass in brief, or every operation."""

from textwrap import wrap
from typing import Any

import click

from lowlat.cli.console import format_bytes, prefill_line, print_table

__all__ = ["print_step"]

METHODS = {"eagle3": "EAGLE3", "mtp": "MTP", "peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark"} | {
    "draft_model": "a draft model"
}
MOST_FUSIONS = 8  # of the short form
KERNELS_WIDTH = 60  # characters of a line of kernels
BYTES = ("weights_bytes", "kv_read_bytes", "kv_written_bytes", "activations_bytes")


def print_step(report: dict[str, Any], *, full: bool = False) -> None:
    """Print a report of `step_report`, which must be full where `full`."""
    _print_heading(report)
    step, prefill = report["step"], report["prefill"]
    title = f"prefill, a pass of {prefill['positions']:,} tokens that ends a prompt of {report['context']:,}"
    for name, part in (("decode step", step), (title, prefill)):
        if full:
            _print_groups(name, part)
        else:
            _print_stages(name, part)
    _print_fusions(report, full=full)
    rows = [[name, entry["count"], format_bytes(entry["bytes"])] for name, entry in report["buffers"].items()]
    if full:
        for name, part in (("step", step), ("prefill", prefill)):
            listed = [list(buffer.values()) for buffer in part["buffers"]]
            print_table(f"buffers of {name}", ("name", "shape", "dtype", "role", "bytes"), listed)
        print_table("buffers by role", ("role", "buffers", "size"), rows)
        return
    click.echo("buffers: " + "; ".join(f"{role} {size} in {count}" for role, count, size in rows))
    click.echo("--full shows every operation, kernel and buffer; --json all of it as an object")


def _print_heading(report: dict[str, Any]) -> None:
    gpu, bucket, method, text = (report[name] for name in ("gpu", "bucket", "method", "text_drafts"))
    drafts = "no speculation" if method is None else METHODS.get(method, method)
    beside = "" if text is None else f" with {text} drafts"
    click.echo(f"{report['model']}, {drafts}{beside}, {bucket['name']}, {report['context']:,} tokens of context")
    count = "" if gpu["count"] == 1 else f"the first of {gpu['count']} x "
    capability, plans = ".".join(map(str, gpu["capability"])), "tuned plans" if gpu["tuned"] else "derived plans"
    click.echo(
        f"{count}{gpu['name']}: {gpu['multiprocessors']} SMs, capability {capability}, {plans}; floors are weights, "
        f"keys and values at {gpu['read_gb_per_s']:,.0f} GB/s"
    )
    click.echo(f"{prefill_line(report['prefill'])}\n")
    if report["kernels_do_not_cover"] is not None:
        click.echo(f"no kernels: {report['kernels_do_not_cover']}; operations run by torch\n")


def _print_stages(title: str, part: dict[str, Any]) -> None:
    rows = [
        [row["stage"], _times(row["times"]), _kernels(row["kernels"]), row["launches"], *_sizes(row)]
        for row in part["stages"]
    ]
    rows.append(["total", "", f"{part['operations']:,} operations", part["launches"], *_sizes(part)])
    columns = ("stage", "", "kernels, named by what they cover", "launches", "weights", "KV", "activations", "floor us")
    print_table(title, columns, rows)


def _print_groups(title: str, part: dict[str, Any]) -> None:
    rows = []
    for group in part["groups"]:
        launches = group["launches"] or [{"library": "none"}]
        for number, launch in enumerate(launches):
            first = number == 0
            rows.append(
                [
                    group["stage"] if first else "",
                    "\n".join(group["operations"]) if first else "",
                    launch.get("kernel") or launch["library"],
                    "x".join(map(str, launch["grid"])) if "grid" in launch else "",
                    launch.get("block", ""),
                    *(_sizes(group) if first else ("", "", "", "")),
                ]
            )
    rows.append(
        ["total", f"{part['operations']:,} operations", f"{part['launches']:,} launches", "", "", *_sizes(part)]
    )
    columns = ("stage", "operations", "kernel", "grid", "block", "weights", "KV", "activations", "floor us")
    print_table(title, columns, rows)


def _print_fusions(report: dict[str, Any], *, full: bool) -> None:
    found: dict[str, dict[str, Any]] = {}
    for part in ("step", "prefill"):
        for each in report[part]["fusions"]:
            entry = found.setdefault(each["name"], {"kinds": each["operations"], "step": 0, "prefill": 0, "saved": 0})
            entry[part] += each["times"]
            entry["saved"] += each["launches_saved"]
    rows = [
        [name, " ".join(each["kinds"]), each["step"], each["prefill"], each["saved"]] for name, each in found.items()
    ]
    left = [] if full else rows[MOST_FUSIONS:]
    shown = rows[: len(rows) - len(left)]
    if left:
        shown.append([f"{len(left)} others", "", *(sum(row[place] for row in left) for place in (2, 3, 4))])
    if shown:
        columns = ("fusion", "operations", "in the step", "in prefill", "launches saved")
        print_table("fusions that apply", columns, shown)


def _times(count: int) -> str:
    return f"x {count}" if count > 1 else ""


def _kernels(kernels: list[dict[str, Any]]) -> str:
    """Names in order, with launches where there are several, in lines."""
    names = [each["name"] + (f" ({each['launches']})" if each["launches"] > 1 else "") for each in kernels]
    words = [name.replace(" ", "\N{NO-BREAK SPACE}") for name in names]  # a name stays on its line
    lines = wrap(", ".join(words), KERNELS_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _sizes(values: dict[str, Any]) -> list[object]:
    weights, read, written, activations = (values[name] for name in BYTES)
    return [_size(weights), _size(read + written), _size(activations), f"{values['floor_us']:,.1f}"]


def _size(count: int) -> str:
    """Return bytes in decimal units, like those of bandwidths."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}" if count < 10 * scale else f"{count / scale:.1f} {unit}"
    return f"{count} B" if count else ""
