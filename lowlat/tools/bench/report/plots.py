"""This module plots result files as self-contained SVG."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, TypeVar

from lowlat.errors import ConfigError
from lowlat.tools.bench.results import Result, Row

if TYPE_CHECKING:
    from lowlat.tools.bench.report.pages import StageProfile

__all__ = ["draw_plots", "draw_profile", "plain_svg"]

WIDTH, HEIGHT = 8.0, 4.2  # inches
K = TypeVar("K")
Plot = Callable[[Any, Sequence[Row]], bool]


def draw_plots(result: Result) -> dict[str, str]:
    """Draw all plots for which a result has figures: title -> SVG. Raises ConfigError without matplotlib."""
    plots: dict[str, Plot] = {
        "Milliseconds a step against context": _against_context,
        "Share of the memory wall": _wall_shares,
        "Tokens a second against accept length": _against_accept_length,
        "Acceptance by position": _by_position,
        "Tail latency of a step": _tails,
    }
    found = {title: _drawn(f"{result.name} {title}", plot, result.rows) for title, plot in plots.items()}
    return {title: svg for title, svg in found.items() if svg}


def draw_profile(profile: "StageProfile") -> str:
    """Draw a profile's stages beside the memory wall. Raises ConfigError without matplotlib."""

    def plot(axes: Any, _: Sequence[Row]) -> bool:
        stages = [stage for stage in profile.stages if stage.share_of_wall is not None]
        axes.barh([stage.stage for stage in stages], [100 * (stage.share_of_wall or 0) for stage in stages])
        axes.invert_yaxis()
        axes.set_xlabel("% of the wall")
        axes.set_xlim(0, 100)
        return bool(stages)

    return _drawn(profile.title, plot, ())


def plain_svg(svg: str, title: str) -> str:
    """Reduce an SVG for embedding in HTML: without prologue, metadata and namespaces."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()


def _drawn(title: str, plot: Plot, rows: Sequence[Row]) -> str:
    """Draw a plot as SVG; empty if there is nothing to draw."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'lowlat[report]', or --no-plots") from error
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        if not plot(axes, rows):
            return ""
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return plain_svg(out.getvalue(), title)


def _against_context(axes: Any, rows: Sequence[Row]) -> bool:
    for (batch, depth), line in _lines(rows, lambda row: (row.case.batch, row.case.depth)).items():
        line.sort(key=lambda row: row.case.context)
        axes.plot(
            [row.mean_context for row in line],
            [row.ms_per_step.p50 for row in line],
            marker="o",
            label=f"batch {batch}, S={depth}",
        )
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms a step, median")
    axes.set_ylim(bottom=0)
    return len({row.case.context for row in rows}) > 1


def _wall_shares(axes: Any, rows: Sequence[Row]) -> bool:
    known = [row for row in rows if row.share_of_wall is not None]
    axes.barh([row.case.name for row in known], [100 * (row.share_of_wall or 0) for row in known])
    _fit_bars(axes, len(known))
    axes.set_xlabel("% of the wall, bytes of a step over its median time")
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    return bool(known)


def _against_accept_length(axes: Any, rows: Sequence[Row]) -> bool:
    drafted = [row for row in rows if row.accept_length is not None]
    for (context, batch), line in _lines(drafted, lambda row: (row.case.context, row.case.batch)).items():
        line.sort(key=lambda row: row.accept_length or 0.0)
        lengths = [row.accept_length or 0.0 for row in line]
        (drawn,) = axes.plot(
            lengths, [row.tokens_per_s for row in line], marker="o", label=f"batch {batch}, context {context}"
        )
        floors = [row.floor_ms for row in line]
        if all(floor is not None for floor in floors):
            bound = [
                1e3 * row.effective_accept_length * row.active_slots.mean / floor
                for row, floor in zip(line, floors, strict=True)
                if floor is not None
            ]
            axes.plot(lengths, bound, linestyle="--", color=drawn.get_color(), label="bound by bytes")
    for row in drafted:
        axes.annotate(f"S={row.case.depth}", (row.accept_length, row.tokens_per_s), fontsize="small")
    axes.set_xlabel("accept length, tokens a drafted step")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    return bool(drafted)


def _by_position(axes: Any, rows: Sequence[Row]) -> bool:
    for row in rows:
        stats = row.eagle_speculation
        if stats is None:
            continue
        shares = [
            100 * share
            for share, drafted in zip(stats.acceptance_by_position, stats.drafted_by_position, strict=True)
            if drafted
        ]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=row.case.name)
    axes.set_xlabel("position of the draft token")
    axes.set_ylabel("% accepted")
    axes.set_ylim(0, 100)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return any(row.eagle_speculation is not None for row in rows)


def _tails(axes: Any, rows: Sequence[Row]) -> bool:
    names = [row.case.name for row in rows]
    for label, values in (
        ("p99.9", [row.ms_per_step.p999 for row in rows]),
        ("p99", [row.ms_per_step.p99 for row in rows]),
        ("median", [row.ms_per_step.p50 for row in rows]),
    ):
        axes.barh(names, values, label=label)
    _fit_bars(axes, len(rows))
    axes.set_xlabel("ms a step")
    axes.invert_yaxis()
    return bool(rows)


def _fit_bars(axes: Any, count: int) -> None:
    """Make the figure as high as its bars need."""
    axes.figure.set_figheight(1.2 + 0.3 * count)


def _lines(rows: Iterable[Row], key: Callable[[Row], K]) -> Mapping[K, list[Row]]:
    found: dict[K, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
