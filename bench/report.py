"""From the rows of `bench.dense` or `bench.gpt_oss` to a table in Markdown and a picture, written next to them.

    python -m bench.report bench/results/h200/dense.json

It measures nothing. The picture needs matplotlib (the extra `bench`); `--no-plot` leaves it out.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lib.run import read_results

__all__ = ["caption", "draw", "main", "table", "write_report"]

OURS, TORCH, FLOOR = "#0072B2", "#E69F00", "#000000"  # Okabe and Ito: told apart by every kind of eye
DENSE_COLUMNS = (
    *("case", "GB a step", "floor, ms", "lowlat p50 / p99, ms", "over the floor"),
    *("torch graph, ms", "speed-up", "tokens/s", "against S = 0"),
)
EXPERTS_COLUMNS = (
    *("case", "experts a layer", "GB a step", "floor, ms", "p50 / p99, ms", "over the floor", "launches", "idle"),
    *("tokens/s", "bound of the speed-up"),
)
Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table as .md, and the picture as .svg and .png, next to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args(arguments)
    print(write_report(options.results, plot=not options.no_plot))


def write_report(results: Path, *, plot: bool) -> str:
    """Write the files; returns the text."""
    result = read_results(results)
    text = f"{table(result['rows'])}\n\n{caption(result)}\n"
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    if plot:
        draw(result, [results.with_suffix(".svg"), results.with_suffix(".png")])
    return text


def table(rows: Sequence[Row]) -> str:
    """The rows as a table of GitHub's Markdown; cases that failed are left out."""
    good = [row for row in rows if "error" not in row]
    has_experts = any("distinct_experts" in row for row in good)
    columns = EXPERTS_COLUMNS if has_experts else DENSE_COLUMNS
    cells: Callable[[Row, Sequence[Row]], list[str]] = _experts_cells if has_experts else _dense_cells
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(cells(row, good))} |" for row in good])


def _dense_cells(row: Row, rows: Sequence[Row]) -> list[str]:
    star = " (sim.)" if row["tokens_per_s_is_simulated"] else ""
    return [
        row["case"],
        f"{row['bytes'] / 1e9:.2f}",
        _number(row["floor_ms"]),
        f"{_number(row['ms_p50'])} / {_number(row['ms_p99'])}",
        _number(row["over_floor"], " x"),
        _number(row.get("torch_graph_ms_p50")),
        _number(row["speed_up_over_torch_graph"], " x"),
        f"{row['tokens_per_s']:.0f}{star}",
        _number(_against_baseline(row, rows), " x"),
    ]


def _experts_cells(row: Row, rows: Sequence[Row]) -> list[str]:
    return [
        row["case"],
        f"{row['distinct_experts']:.1f}",
        f"{row['bytes'] / 1e9:.2f}",
        _number(row["floor_ms"]),
        f"{_number(row['ms_p50'])} / {_number(row['ms_p99'])}",
        _number(row["over_floor"], " x"),
        str(row["launches"]),
        "-" if row["idle_share"] is None else f"{row['idle_share']:.1%}",
        _by_length(row["tokens_per_s"], ".0f"),
        _by_length(row.get("bound_speedup"), ".2f", " x"),
    ]


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _by_length(values: Mapping[str, float] | float | None, form: str, unit: str = "") -> str:
    """A figure, or one for each simulated accept length."""
    if values is None:
        return "-"
    if not isinstance(values, Mapping):
        return format(values, form) + unit
    return " / ".join(format(value, form) for value in values.values()) + unit + " (sim.)"


def _against_baseline(row: Row, rows: Sequence[Row]) -> float | None:
    """Tokens/s over those at S = 0 of the same batch and context; None at S = 0 and where that was not measured."""
    if not row["num_speculative_tokens"]:
        return None
    place = (row["batch"], row["context"], 0)
    for other in rows:
        if (other["batch"], other["context"], other["num_speculative_tokens"]) == place:
            return float(row["tokens_per_s"] / other["tokens_per_s"])
    return None


def caption(result: Mapping[str, Any]) -> str:
    """The conditions in a few sentences."""
    rows = [row for row in result["rows"] if "error" not in row]
    if not rows:
        return "No case was measured."
    conditions, has_experts = result["conditions"], "distinct_experts" in rows[0]
    parts = _experts_caption(rows[0], conditions) if has_experts else _dense_caption(rows, conditions)
    if conditions.get("small"):
        parts.append("A tiny geometry: the figures mean little.")
    return " ".join(parts)


def _machine(row: Row) -> str:
    versions = f"{row['card']}, driver {row['driver']}, CUDA {row['cuda']}, torch {row['torch']}"
    return f"{versions}; commit {row['commit']}"


def _floor(row: Row) -> str:
    return (
        f"The floor is the bytes of a step at {row['wall_gb_per_s']:.0f} GB/s, the GPU's streaming read bandwidth "
        "through a kernel of ours in the same run"
    )


def _dense_caption(rows: Sequence[Row], conditions: Mapping[str, Any]) -> list[str]:
    first, model = rows[0], conditions["model"]
    lengths = {(row["num_speculative_tokens"], row["simulated_accept_length"]) for row in rows}
    imposed = ", ".join(f"{length:.2f} at S = {depth}" for depth, length in sorted(lengths) if depth)
    parts = [
        f"{model['name']}'s shape, {model['weights']}; {_machine(first)}; {first['replays']} replays.",
        f"{_floor(first)}.",
        "The torch graph is the same step of torch's own operations, captured, with the fastest attention of those it "
        "offers, in turns with ours; it neither accepts, commits nor publishes.",
    ]
    if imposed:
        parts.append(f"Tokens/s with drafts are simulated: the accept length is imposed, in tokens a step {imposed}.")
    return parts


def _experts_caption(first: Row, conditions: Mapping[str, Any]) -> list[str]:
    lengths = ", ".join(str(length) for length in conditions["accept_lengths"])
    return [
        f"Weights: {conditions['weights']}; {_machine(first)}; medians of {first['replays']} replays.",
        f"{_floor(first)}; a layer's distinct experts are counted in a step.",
        f"With drafts, tokens/s and the bound are simulated: the accept lengths {lengths} are assumed, and the bound "
        "is the ratio of the floors times the accept length.",
    ]


def draw(result: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Bars of each case, the floor as a line across them, and the figures at their ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "lowlat"  # the same file from the same rows
    rows = [row for row in result["rows"] if "error" not in row]
    figure, axis = pyplot.subplots(figsize=(7.2, 0.9 + 0.62 * len(rows)), constrained_layout=True)
    longest = max([row.get(name) or 0.0 for row in rows for name in ("ms_p50", "torch_graph_ms_p50")], default=1.0)
    for index, row in enumerate(rows):
        _draw_case(axis, index, row, longest)
    axis.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * longest)
    axis.set_xlabel("ms a step, median; the line is the memory floor")
    axis.spines[["top", "right"]].set_visible(False)
    if rows:
        model = result["conditions"].get("model")
        name = "gpt-oss MXFP4" if model is None else f"{model['name']} bf16"
        axis.set_title(f"{name}, one step on {rows[0]['card']}", loc="left", fontsize=10)
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    pyplot.close(figure)


def _draw_case(axis: Any, index: int, row: Row, longest: float) -> None:
    floor, theirs = row["floor_ms"], row.get("torch_graph_ms_p50")
    bars = [(row["ms_p50"], OURS, "lowlat")] + ([(theirs, TORCH, "torch graph")] if theirs else [])
    height = 0.68 / len(bars)
    for number, (took, colour, name) in enumerate(bars):
        place = index + (number - (len(bars) - 1) / 2) * height
        axis.barh(place, took, 0.9 * height, color=colour)
        text = f"{name} {took:.2f} ms, {took / floor:.2f} x the floor"
        axis.text(max(took, floor) + 0.012 * longest, place, text, va="center", fontsize=8)
    axis.plot([floor, floor], [index - 0.42, index + 0.42], color=FLOOR, linewidth=1.6)


if __name__ == "__main__":
    main()
