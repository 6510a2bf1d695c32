"""`lowlat top`: a running server's figures, once a second: slots, queue, speed, times, acceptance, KV use."""

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.connecting import connected, endpoint_of, server_options
from lowlat.cli.console import format_bytes
from lowlat.cli.options import as_json
from lowlat.cli.reports.served_models import OneServer, SeveralServers, Shown
from lowlat.errors import ServerGone
from lowlat.ipc.endpoint import default_endpoint
from lowlat.options.runtime import FEW_SLOTS
from lowlat.serving.models.roster import roster_of

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["command"]

BAR = 24
TIMES = {
    "time_to_first_token_ms": "first token",
    "inter_token_ms": "between tokens",
    "queued_ms": "queued",
    "duration_ms": "whole request",
    "step_ms": "one step",
}


@click.command("top")
@server_options
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600.0), default=1.0, show_default=True, metavar="S", help="Seconds."
)
@click.option("--model", metavar="NAME", help="One of a server's several models; without it a line for each.")
@click.option("--once", is_flag=True, help="Show one snapshot and end; so it is without a terminal, unless --json.")
@as_json
def command(
    endpoint: str | None, curve_keys: Path | None, interval: float, model: str | None, once: bool, json_output: bool
) -> None:
    """Watch a running server: slots, queue, tokens a second, times, acceptance by position, use of the KV cache.

    q or Ctrl-C ends it. With --json every snapshot is one line.
    """
    with ExitStack() as stack:
        roster = None if model is not None else roster_of(endpoint or default_endpoint())
        shown: Shown
        if roster is None:
            shown = OneServer(
                stack.enter_context(connected(endpoint_of(endpoint, model), curve_keys, "lowlat top")), render
            )
        else:
            shown = stack.enter_context(SeveralServers(roster))
        if json_output:
            _print_lines(shown, interval, once)
        elif once or not can_redraw():
            _print_once(shown)
        else:
            _watch(shown, interval)


def can_redraw() -> bool:
    """Whether stdout is a terminal that can show a snapshot in place of the one before."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _print_lines(shown: Shown, interval: float, once: bool) -> None:
    while True:
        click.echo(json.dumps(shown.figures()))
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval)


def _print_once(shown: Shown) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else 100
    Console(file=sys.stdout, width=width, highlight=False).print(shown.render())


def _watch(source: Shown, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), screen=True, auto_refresh=False) as live, _single_keys():
        try:
            while True:
                try:
                    shown = source.render()
                except ServerGone as error:  # it may come back: the next call connects again
                    shown = Text(f"{error}\n\nwaiting for a server; q ends this", style="red")
                live.update(shown, refresh=True)
                if _is_quit(interval):
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _single_keys() -> Iterator[None]:
    """Give a terminal's keys as they are pressed, and show none, until the end."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit(seconds: float) -> bool:
    """Wait so long, or until q is pressed on a terminal, or the terminal is gone; returns whether it was."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed or b"q" in pressed.lower():
                return True
    return False


def render(stats: dict[str, Any], endpoint: str) -> "RenderableType":
    """A snapshot as a few tables; what the server does not say is left out."""
    from rich.console import Group
    from rich.text import Text

    engine = stats.get("engine", {})
    speed = f"{stats.get('tokens_per_s', 0.0):,.1f} tokens/s"
    title = (
        f"{stats.get('model', '')} on {engine.get('device', '?')}, {stats.get('state', '?')} for "
        f"{_duration(stats.get('uptime_s', 0.0))} at {endpoint}"
    )
    counts = (
        f"{speed}   running {stats.get('num_running', 0)}/{stats.get('num_slots', 0)}   "
        f"waiting {stats.get('num_waiting', 0)}/{stats.get('max_queue', 0)}   clients {stats.get('num_clients', 0)}   "
        f"requests {stats.get('num_requests', 0):,}   tokens {stats.get('num_tokens', 0):,}"
    )
    parts: list[RenderableType] = [Text(title, style="bold"), Text(counts)]
    kinds = {"ends": "", "conversions": "conversion: ", "refusals": "refused: "}
    ends = {f"{title}{how}": count for kind, title in kinds.items() for how, count in stats.get(kind, {}).items()}
    if ends:
        parts.append(Text("ended     " + ", ".join(f"{name} {count:,}" for name, count in ends.items())))
    parts += [_slots(stats, engine), _times(stats, engine)]
    kv = engine.get("kv")
    if kv:
        parts.append(_kv(kv))
        parts += _below(kv)
    if held_up := engine.get("held_up"):
        parts.append(Text(f"held up   {held_up['text']}", style="bold"))
    parts += [_memory(each) for each in engine.get("memory", ())]
    speculation = engine.get("eagle_speculation")
    if speculation:
        parts.append(_acceptance(speculation))
    if partial := engine.get("specpv"):
        counts = f"{partial['partial_steps']:,} partial steps, {partial['refreshes']:,} refreshes"
        parts.append(Text(f"SpecPV    {'lossy' if partial['lossy'] else 'lossless'}: {counts}"))
    return Group(*parts)


def _slots(stats: dict[str, Any], engine: dict[str, Any]) -> "RenderableType":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="slots", title_justify="left", title_style="bold")
    for name in ("slot", "phase", "prompt", "generated", "at most", ""):
        table.add_column(name, justify="left" if name in ("phase", "") else "right")
    by_slot = {slot["slot"]: slot for slot in engine.get("slots", ())}
    num_slots = stats.get("num_slots", 0)
    is_long = num_slots > FEW_SLOTS  # then the free slots share one line
    for number in sorted(by_slot) if is_long else range(num_slots):
        slot = by_slot.get(number)
        if slot is None:
            table.add_row(str(number), "free")
            continue
        done, most = slot["completion_tokens"], slot["max_tokens"]
        table.add_row(
            *(str(number), slot["phase"], str(slot["prompt_tokens"]), str(done), str(most)), _bar(done / max(most, 1))
        )
    if is_long and len(by_slot) < num_slots:
        table.add_row("", f"{num_slots - len(by_slot)} free")
    return table


def _times(stats: dict[str, Any], engine: dict[str, Any]) -> "RenderableType":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="times, ms", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("p50", "p90", "p99", "max", "count"):
        table.add_column(name, justify="right")
    for name, title in TIMES.items():
        figures = stats.get(name, engine.get(name))
        if figures and figures["count"]:
            cells = [f"{figures[column]:,.2f}" for column in ("p50", "p90", "p99", "max")]
            table.add_row(title, *cells, f"{figures['count']:,}")
    return table


def _kv(kv: dict[str, Any]) -> "RenderableType":
    from rich.text import Text

    used, total = kv["num_used"], max(kv["num_blocks"], 1)
    hits = kv["hit_tokens"] / kv["query_tokens"] if kv["query_tokens"] else 0.0
    capacity = f" ({kv['capacity_tokens']:,} tokens)" if "capacity_tokens" in kv else ""  # older servers do not have it
    return Text(
        f"KV        {_bar(used / total)} {used}/{total} blocks{capacity}, {kv['num_evictable']} reusable; "
        f"{hits:.0%} of prompt tokens reused"
    )


def _below(kv: dict[str, Any]) -> "list[RenderableType]":
    """The tiers below the device's memory, and sessions, where there are any."""
    from rich.text import Text

    lines: list[RenderableType] = []
    if tiers := kv.get("tiers"):
        disk = f", {format_bytes(tiers['disk_bytes'])} in files" if "disk_bytes" in tiers else ""
        rate = tiers["bytes_in"] / tiers["copy_in_s"] if tiers["copy_in_s"] else 0.0
        speed = f" at {format_bytes(round(rate))}/s" if rate else ""
        lines.append(Text(
            f"tiers     {format_bytes(tiers['host_bytes'])} in host memory{disk}; {tiers['hits']:,} hits, "
            f"{tiers['read']:,} read, {tiers['misses']:,} missing; "
            f"{format_bytes(tiers['bytes_in'])} to the device{speed}, "
            f"{format_bytes(tiers['bytes_out'])} from it; {tiers['copies_under_way']} copies under way"
        ))  # fmt: skip
    if sessions := kv.get("sessions"):
        pools = [kv, *kv.get("windows", ()), *kv.get("snapshots", ())]
        broken = sum(pool.get("num_broken_pins", 0) for pool in pools)
        lost = f", {broken} gone" if broken else ""
        lines.append(Text(
            f"sessions  {sessions['num_sessions']} live, {sessions['num_running']} with requests; "
            f"{kv.get('num_pinned', 0)} blocks pinned{lost}"
        ))  # fmt: skip
    return lines


def _memory(held: dict[str, Any]) -> "RenderableType":
    """The memory that a device held when all was loaded; nothing is allocated after that."""
    from rich.text import Text

    total, free = held["total_bytes"], held["free_bytes"]
    other = held["state_bytes"] + held["scratch_bytes"] + held["prefill_bytes"]
    parts = {"weights": held["weights_bytes"], "KV": held["kv_bytes"], "other": other}
    shown = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items())
    use = "" if total is None else f"{_bar(1 - free / total)} {format_bytes(total - free)}/{format_bytes(total)} "
    return Text(f"memory    {held['device']} {use}{shown}" + (f"; {format_bytes(free)} free" if free else ""))


def _acceptance(speculation: dict[str, Any]) -> "RenderableType":
    from rich.text import Text

    lines = [
        f"accepted  {speculation['mean_acceptance_length']:.2f} tokens a drafted step, "
        f"{speculation['mean_acceptance_rate']:.0%} of draft tokens" + (" (simulated)" * speculation["simulated"])
    ]
    for depth, (share, drafted) in enumerate(
        zip(speculation["acceptance_by_position"], speculation["drafted_by_position"], strict=True), 1
    ):
        if drafted:
            lines.append(f"  draft {depth} {_bar(share)} {share:4.0%}")
    return Text("\n".join(lines))


def _bar(share: float) -> str:
    filled = round(min(max(share, 0.0), 1.0) * BAR)
    return "\N{FULL BLOCK}" * filled + "\N{LIGHT SHADE}" * (BAR - filled)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
