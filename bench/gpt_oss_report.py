"""From the rows of the gpt-oss benchmark to a table in Markdown and a picture, written next to them.

    python -m bench.gpt_oss_report bench/results/h200/gpt_oss.json

It measures nothing. The picture needs matplotlib (the extra `bench`).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.dense_cases import read_results
from bench.dense_report import FLOOR, OURS
from lowlat.tools.profile.report import Summary

__all__ = ["caption", "draw", "main", "show_kernels", "table", "write_report"]

COLUMNS = (
    *("case", "experts a layer", "GB a step", "floor, ms", "p50 / p99, ms", "over the floor", "launches", "idle"),
    *("tokens/s", "bound of the speed-up"),
)
SHOWN = 16  # kernels of a profile


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table as .md, and the picture as .svg and .png, next to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args(arguments)
    print(write_report(options.results, plot=not options.no_plot))


def write_report(results: Path, *, plot: bool) -> str:
    """Write both files; returns the text."""
    result = read_results(results)
    text = f"{table(result['rows'])}\n\n{caption(result)}\n"
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    if plot:
        draw(result, [results.with_suffix(".svg"), results.with_suffix(".png")])
    return text


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table of GitHub's Markdown; cases that failed are left out."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows if "error" not in row]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["case"],
        f"{row['distinct_experts']:.1f}",
        f"{row['bytes'] / 1e9:.2f}",
        f"{row['floor_ms']:.2f}",
        f"{row['ms_p50']:.2f} / {row['ms_p99']:.2f}",
        f"{row['over_floor']:.2f} x",
        str(row["launches"]),
        f"{row['idle_share']:.1%}",
        _by_length(row["tokens_per_s"], ".0f"),
        _by_length(row.get("bound_speedup"), ".2f", " x"),
    ]


def _by_length(values: Mapping[str, float] | float | None, form: str, unit: str = "") -> str:
    """A figure, or one for each simulated accept length."""
    if values is None:
        return "-"
    if not isinstance(values, Mapping):
        return format(values, form) + unit
    return " / ".join(format(value, form) for value in values.values()) + unit + " (sim.)"


def caption(result: Mapping[str, Any]) -> str:
    """The conditions in a few sentences."""
    rows = [row for row in result["rows"] if "error" not in row]
    if not rows:
        return "No case was measured."
    first, conditions = rows[0], result["conditions"]
    lengths = ", ".join(str(length) for length in conditions["accept_lengths"])
    parts = [
        f"Weights: {conditions['weights']}; {first['card']}, driver {first['driver']}, CUDA {first['cuda']}, torch "
        f"{first['torch']}; commit {first['commit']}; medians of {first['replays']} replays.",
        f"The floor is the bytes of a step at {first['wall_gb_per_s']:.0f} GB/s, the GPU's streaming read bandwidth "
        "through a kernel of ours in the same run; a layer's distinct experts are counted in a step.",
        f"With drafts, tokens/s and the bound are simulated: the accept lengths {lengths} are assumed, and the bound "
        "is the ratio of the floors times the accept length.",
    ]
    if conditions["small"]:
        parts.append("A tiny geometry: the figures mean little.")
    return " ".join(parts)


def draw(result: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """A bar a case, the floor as a line across it, and the figures at its end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "lowlat"  # the same file from the same rows
    rows = [row for row in result["rows"] if "error" not in row]
    figure, axis = pyplot.subplots(figsize=(7.2, 0.9 + 0.42 * len(rows)), constrained_layout=True)
    longest = max([row["ms_p50"] for row in rows], default=1.0)
    for index, row in enumerate(rows):
        took, floor = row["ms_p50"], row["floor_ms"]
        axis.barh(index, took, 0.6, color=OURS)
        axis.plot([floor, floor], [index - 0.4, index + 0.4], color=FLOOR, linewidth=1.6)
        text = f"{took:.2f} ms, {row['over_floor']:.2f} x the floor"
        axis.text(max(took, floor) + 0.012 * longest, index, text, va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * longest)
    axis.set_xlabel("ms a step, median; the line is the memory floor")
    axis.spines[["top", "right"]].set_visible(False)
    if rows:
        axis.set_title(f"gpt-oss MXFP4, one step on {rows[0]['card']}", loc="left", fontsize=10)
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    pyplot.close(figure)


def show_kernels(title: str, summary: Summary) -> None:
    """Print the kernels that take most of a step, all launches of each together."""
    print(f"{title}: {summary.step_us:.1f} us a step, {summary.num_launches} launches, idle {summary.idle.share:.1%}")
    for row in summary.kernels[:SHOWN]:
        rate = "" if row.share_of_wall is None else f"{row.share_of_wall:7.1%} of the wall"
        each = row.time_us / row.num_launches
        print(f"{row.time_us:9.1f} us {row.share:6.1%} {row.num_launches:4d} x {each:7.2f} us  {row.kernel}  {rate}")


if __name__ == "__main__":
    main()
