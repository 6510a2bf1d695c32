"""From the rows of the dense benchmark to a table in Markdown and a picture, written next to them.

    python -m bench.dense_report bench/results/h200/dense.json

It measures nothing. The picture needs matplotlib (the extra `bench`); `--no-plot` leaves it out.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.dense_cases import read_results

__all__ = ["caption", "draw", "main", "table"]

OURS, TORCH, FLOOR = "#0072B2", "#E69F00", "#000000"  # Okabe and Ito: told apart by every kind of eye
COLUMNS = (
    *("case", "GB a step", "floor, ms", "lowlat p50 / p99, ms", "over the floor"),
    *("torch graph, ms", "speed-up", "tokens/s", "against S = 0"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table as .md, and the picture as .svg and .png, next to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="files to write, without their epilogues")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args(arguments)
    result = read_results(options.results)
    stem = options.out or options.results.with_suffix("")
    text = f"{table(result['rows'])}\n\n{caption(result)}\n"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    if not options.no_plot:
        draw(result, [stem.with_suffix(".svg"), stem.with_suffix(".png")])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table of GitHub's Markdown; cases that failed are left out."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    lines += [f"| {' | '.join(_cells(row, rows))} |" for row in rows if "error" not in row]
    return "\n".join(lines)


def caption(result: Mapping[str, Any]) -> str:
    """The conditions in a few sentences."""
    rows = [row for row in result["rows"] if "error" not in row]
    if not rows:
        return "No case was measured."
    first, model = rows[0], result["conditions"]["model"]
    lengths = sorted(
        {(r["num_speculative_tokens"], r["simulated_accept_length"]) for r in rows if r["simulated_accept_length"]}
    )
    imposed = ", ".join(f"{length:.2f} at S = {depth}" for depth, length in lengths)
    parts = [
        f"{model['name']}'s shape, {model['weights']}; {first['card']}, driver {first['driver']}, "
        f"CUDA {first['cuda']}, torch {first['torch']}; commit {first['commit']}; {first['replays']} replays.",
        f"The floor is the bytes of a step at {first['wall_gb_per_s']:.0f} GB/s, the GPU's streaming read bandwidth "
        "through a kernel of ours in the same run.",
        "The torch graph is the same step of torch's own operations, captured, with the fastest attention of those it "
        "offers, in turns with ours; it neither accepts, commits nor publishes.",
    ]
    if imposed:
        parts.append(f"Tokens/s with drafts are simulated: the accept length is imposed, in tokens a step {imposed}.")
    if result["conditions"].get("dry_run"):
        parts.append("A dry run on a CPU: the figures mean nothing.")
    return " ".join(parts)


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    star = " (sim.)" if row["tokens_per_s_is_simulated"] else ""
    tokens = row["tokens_per_s"]
    return [
        row["case"],
        f"{row['bytes'] / 1e9:.2f}",
        _number(row["floor_ms"]),
        f"{_number(row['ms_p50'])} / {_number(row['ms_p99'])}",
        _number(row["over_floor"], " x"),
        _number(row.get("torch_graph_ms_p50")),
        _number(row["speed_up_over_torch_graph"], " x"),
        "-" if tokens is None else f"{tokens:.0f}{star}",
        _number(_against_baseline(row, rows), " x"),
    ]


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _against_baseline(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens/s over those at S = 0 of the same batch and context; None at S = 0 and where that was not measured."""
    if not row["num_speculative_tokens"] or row["tokens_per_s"] is None:
        return None
    place = (row["batch"], row["context"], 0)
    for other in rows:
        same = (other["batch"], other["context"], other["num_speculative_tokens"]) == place
        if same and other.get("tokens_per_s"):
            return float(row["tokens_per_s"] / other["tokens_per_s"])
    return None


def draw(result: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Bars of both times a case, the floor as a line across them, and the figures at their ends."""
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
    axis.set_xlabel("ms a step, median")
    axis.spines[["top", "right"]].set_visible(False)
    if rows:
        title = f"{result['conditions']['model']['name']} bf16, one step on {rows[0]['card']}"
        axis.set_title(title, loc="left", fontsize=10)
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    pyplot.close(figure)


def _draw_case(axis: Any, index: int, row: Mapping[str, Any], longest: float) -> None:
    floor = row["floor_ms"]
    bars = (
        (index - 0.19, row["ms_p50"], OURS, "lowlat", row["over_floor"]),
        (index + 0.19, row.get("torch_graph_ms_p50"), TORCH, "torch graph", row["torch_graph_over_floor"]),
    )
    for place, took, colour, name, over in bars:
        if took is not None:
            axis.barh(place, took, 0.34, color=colour)
            text = f"{name} {took:.2f} ms, {over:.2f} x the floor"
            axis.text(max(took, floor) + 0.012 * longest, place, text, va="center", fontsize=8)
    axis.plot([floor, floor], [index - 0.42, index + 0.42], color=FLOOR, linewidth=1.6)
    if index == 0:
        axis.annotate(
            "memory floor", (floor, index - 0.42), (0, 2), textcoords="offset points", ha="center", fontsize=8
        )


if __name__ == "__main__":
    main()
