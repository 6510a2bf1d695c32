"""This module writes the report of a directory of results: one HTML page, and the same tables in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import msgspec

from lowlat.errors import ConfigError
from lowlat.tools.bench.gates import GateRun, read_state
from lowlat.tools.bench.report.plots import draw_plots, draw_profile
from lowlat.tools.bench.results import Environment, Result, read_results

__all__ = ["ReportPages", "Stage", "StageProfile", "Table", "make_report", "read_profiles", "write_pages"]

COLUMNS = (
    "case", "ms a step p50 / p99 / p99.9", "ms a token", "first token, ms", "tokens/s", "accept length",
    "a step and slot", "active slots", "GB a step", "of the wall", "against S=0",
)  # fmt: skip
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "th,td{border:1px solid #ccc;padding:.2rem .6rem;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}"
    ".warning{background:#fff3cd;padding:.4rem .8rem}"
)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a profile: its time a step, and its share of the GPU's bandwidth."""

    stage: str
    time_us: float | None
    share: float | None
    share_of_wall: float | None


class StageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `lowlat profile --json`, as far as the report needs it."""

    model: str
    gpu: str = msgspec.field(name="card")
    batch: int
    num_speculative_tokens: int
    contexts: tuple[int, ...]
    step_us: float
    stages: tuple[Stage, ...]

    @property
    def title(self) -> str:
        """Model and case."""
        context = max(self.contexts, default=0)
        return f"Stages of {self.model}: {self.batch} x {context}, S={self.num_speculative_tokens}, on {self.gpu}"


@dataclass(frozen=True)
class Table:
    """A table of the report, for both pages."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Write it as Markdown, with numbers aligned right."""
        cells = [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        rule = "|".join(["---", *(["---:"] * (len(self.columns) - 1))])
        lines = [" | ".join(self.columns), *(" | ".join(row) for row in cells)]
        return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])

    def html(self) -> str:
        """Write it as HTML, with all text escaped."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class ReportPages:
    """The two forms of a report."""

    html: str
    markdown: str


def make_report(directory: Path, *, plots: bool = True) -> ReportPages:
    """Make the report of all results, gates and profiles in a directory.

    plots  draw them, which needs matplotlib
    Raises ConfigError if there is no result, or no matplotlib.
    """
    results = read_results(directory)
    title = "lowlat: " + ", ".join(sorted({result.environment.model for result in results.values()}))
    html, markdown = [f"<h1>{escape(title)}</h1>"], [f"# {title}"]

    def add(heading: str, table: Table, notes: Sequence[str] = (), warnings: Sequence[str] = ()) -> None:
        html.append(f"<h2>{escape(heading)}</h2>{table.html()}")
        html.extend(f"<p>{escape(note)}</p>" for note in notes)
        html.extend(f'<p class="warning">{escape(warning)}</p>' for warning in warnings)
        markdown.extend([f"## {heading}", table.markdown(), *notes, *(f"**{warning}**" for warning in warnings)])

    for name, result in results.items():
        add(name, _rows(result), [_conditions(result.environment)], _warnings(result))
        if plots:
            html.extend(_figure(heading, svg) for heading, svg in draw_plots(result).items())
    runs = read_state(directory).runs
    if runs:
        add("gates", _gates(runs))
    for profile in read_profiles(directory):
        add(profile.title, _stages(profile))
        if plots:
            html.append(_figure("Share of the wall by stage", draw_profile(profile)))
    return ReportPages(_page(title, "\n".join(html)), "\n\n".join(markdown) + "\n")


def read_profiles(directory: Path) -> list[StageProfile]:
    """Read the profiles among the JSON files of a directory; other files are ignored."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=StageProfile))
        except (OSError, msgspec.DecodeError):
            continue
    return found


def _conditions(environment: Environment) -> str:
    """Describe the conditions of rows in one line."""
    e = environment
    strict = ", strict" if e.perf_mode == "strict" else ""
    strict += f", weights rounded to {e.quantize}" if e.quantize else ""
    strict += f", prompts' rows rounded to {e.activations}" if e.activations else ""
    machine = f"{e.gpu}, driver {e.driver}, CUDA {e.cuda}" if e.gpu else f"{e.processor}, {e.threads} threads"
    parts = [
        f"{e.model}, {e.dtype}" + (f", drafts by {e.speculator}" if e.speculator else ""),
        f"{machine}, {e.executor} executor{', device loop' if e.device_loop else ''}{strict}, {e.cores} cores",
        f"lowlat {e.lowlat}{f', commit {e.commit}' if e.commit else ''}, torch {e.torch}, Python {e.python}",
        f"prompts: {e.prompts}" + (f", {e.distinct_prompt_tokens} tokens" if e.distinct_prompt_tokens else ""),
        f"temperature {e.temperature}",
        f"simulated: {', '.join(e.simulated) or 'nothing'}",
    ]
    return "; ".join(parts) + "."


def _warnings(result: Result) -> list[str]:
    found = [] if result.complete else ["This scenario is not complete."]
    if result.forced:
        found.append("Run by force: its gates, or gates before those, were not green.")
    return found + [f"Not measured: {failure.case.name}: {failure.error}" for failure in result.failures]


def _rows(result: Result) -> Table:
    rows = []
    for row in result.rows:
        case = row.case
        baseline = result.row(msgspec.structs.replace(case, num_speculative_tokens=0, policy="fixed"))
        gain = (
            row.tokens_per_s / baseline.tokens_per_s if baseline is not None and case.num_speculative_tokens else None
        )
        step, first, slots = row.ms_per_step, row.time_to_first_token_ms, row.active_slots
        simulated = " (sim.)" if row.simulated_accept_length is not None else ""
        rows.append(
            (
                case.name if row.mean_width is None else f"{case.name}, {row.mean_width:.2f} on average",
                f"{step.p50:.3f} / {step.p99:.3f} / {step.p999:.3f}",
                f"{row.ms_per_token.mean:.3f}",
                "" if first is None else f"{first.p50:.1f}",
                f"{row.tokens_per_s:.1f}{simulated}",
                "" if row.accept_length is None else f"{row.accept_length:.2f}{simulated}",
                f"{row.effective_accept_length:.2f}",
                f"{slots.min} / {slots.mean:.1f} / {slots.max}",
                f"{row.bytes_per_step / 1e9:.3f}",
                "" if row.share_of_wall is None else f"{row.share_of_wall:.0%}",
                "" if gain is None else f"{gain:.2f} x{simulated}",
            )
        )
    return Table(COLUMNS, rows)


def _gates(runs: Sequence[GateRun]) -> Table:
    rows = []
    for number, run in enumerate(runs, 1):
        for gate in run.gates:
            shown = (gate.speed_up, gate.required_speed_up, gate.accept_length, gate.required_accept_length)
            figures = ["" if value is None else f"{value:.2f}" for value in shown]
            if not gate.accept_tested:
                figures[-1] = "not tested"
            state = ("green" if gate.green else gate.error or "red") + (", by force" if run.forced else "")
            simulated = ", ".join(run.environment.simulated) or "nothing"
            steps = [
                "" if ms is None else f"{ms:.3f}" if over is None else f"{ms:.3f}, {over:.2f} x"
                for ms, over in (
                    (gate.baseline_ms, gate.baseline_over_floor),
                    (gate.drafted_ms, gate.drafted_over_floor),
                )
            ]
            rows.append((gate.name, str(number), *figures, *steps, state, simulated))
    asked = ("speed-up", "asked for", "accept length", "asked for", "S = 0, ms over its floor", "drafted")
    columns = ("gate", "run", *asked, "state", "simulated")
    return Table(columns, rows)


def _stages(profile: StageProfile) -> Table:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    rows = [
        (stage.stage, shown(stage.time_us, ".1f"), shown(stage.share, ".1%"), shown(stage.share_of_wall, ".1%"))
        for stage in profile.stages
    ]
    return Table(
        ("stage", "us a step", "share", "of the wall"), [*rows, ("the step", f"{profile.step_us:.1f}", "", "")]
    )


def _figure(heading: str, svg: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(heading)}</figcaption></figure>" if svg else ""


def _page(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def write_pages(pages: ReportPages, directory: Path) -> tuple[Path, Path]:
    """Write report.html and report.md into a directory. Raises ConfigError if that fails."""
    paths = directory / "report.html", directory / "report.md"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (pages.html, pages.markdown), strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory}: the report cannot be written: {error.strerror}") from error
    return paths
