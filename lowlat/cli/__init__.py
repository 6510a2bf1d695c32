"""This package is the command line, `lowlat COMMAND`. It imports a command's module only when the command runs.

Exit codes: 0 success; 1 a failure, or a check that failed; 2 a wrong option, model directory or request; 3 `inspect
run` found no active speculation; 130 interrupted. An error is one line on stderr; with --json also an object with
`error` on stdout. `--debug` shows the traceback.
"""

import os
import signal
import sys
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import Any

import click

from lowlat import __version__
from lowlat.cli import familiar
from lowlat.cli.failures import INTERRUPTED, failure, failures_told, flush_output, message_of

__all__ = ["COMMANDS", "LazyGroup", "cli", "main"]

# name -> (module, which holds a click command of the name `command`; what `lowlat --help` says of it)
COMMANDS = {
    "demo": ("lowlat.cli.commands.demo", "Speculate on the bundled model, and check it against plain decoding."),
    "generate": (
        "lowlat.cli.commands.generate",
        "Continue a prompt, or answer one, with any model.",
    ),
    "serve": ("lowlat.cli.commands.serve", "Serve a model to other processes, until it is ended."),
    "http": ("lowlat.cli.commands.http", "Start an HTTP gateway to a running server: OpenAI's interface, and a page."),
    "chat": ("lowlat.cli.commands.chat", "Talk with a model, or with a running server."),
    "pull": ("lowlat.cli.commands.pull", "Fetch a model into the cache, so that a later start needs no network."),
    "top": ("lowlat.cli.commands.top", "Watch a running server: slots, queue, speed, acceptance."),
    "sleep": ("lowlat.cli.commands.sleep", "Have a server's model give its memory back, until a request wakes it."),
    "wake": ("lowlat.cli.commands.wake", "Have a server's model take its memory again."),
    "inspect": (
        "lowlat.cli.commands.inspect",
        "Show geometry and memory of a model, draft model or tree; see if a pair speculates.",
    ),
    "models": ("lowlat.cli.commands.models", "List published models that run, and which fit this machine."),
    "draft-model": (
        "lowlat.cli.commands.draft_model",
        "Make a draft model that drafts fewer ids of one that has more.",
    ),
    "quantize": ("lowlat.cli.commands.quantize", "Write a checkpoint of 8 or 4 bits of a plain one."),
    "compare": (
        "lowlat.cli.commands.compare",
        "Compare target and draft model, stage by stage, with another implementation.",
    ),
    "profile": ("lowlat.cli.commands.kernels.profile", "Show where a decode step's time goes on an NVIDIA GPU."),
    "compile": (
        "lowlat.cli.commands.kernels.compile",
        "Compile a model's kernels ahead, for a GPU that need not be there.",
    ),
    "tune": ("lowlat.cli.commands.kernels.tune", "Find the fastest plans of a pair's kernels on this GPU."),
    "bench": ("lowlat.cli.commands.bench", "Measure scenarios, hold them against gates, compare and report results."),
    "doctor": ("lowlat.cli.commands.doctor", "Check this machine, and that a draft model and its target fit together."),
}
ALIASES = {"head": "draft-model"}


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command's module; None for an unknown name."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        command = import_module(COMMANDS[name][0]).command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. Raises a usage error that names the nearest command for an unknown one."""
        name = args[0]
        if not name.startswith("-") and ALIASES.get(name, name) not in COMMANDS:
            near = [familiar.COMMANDS[name]] if name in familiar.COMMANDS else get_close_matches(name, COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command {name!r:.80}. Did you mean {near[0]!r}?")
            model = "/" in name or name.startswith(".")
            ctx.fail(f"No such command {name!r:.80}.{f' Did you mean `lowlat chat {name:.80}`?' if model else ''}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and print its error as a message, unless --debug is given."""
        from lowlat.cli.console import log_to_stderr, print_error_json

        try:
            with log_to_stderr():
                return super().invoke(ctx)
        except (click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            print_error_json("interrupted")
            raise
        except click.ClickException as error:
            print_error_json(message_of(error))
            raise
        except Exception as error:
            if ctx.params["debug"]:
                raise
            told = failure(error)
            print_error_json(told.message)
            raise told from error

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line; without `standalone_mode`, the caller gets results and errors."""
        group: Any = super()
        if not standalone_mode:
            return group.main(*args, standalone_mode=False, **extra)
        with failures_told():
            code = group.main(*args, standalone_mode=False, **extra)
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="lowlat")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Large language models decoded at the lowest latency one GPU host can give."""


def main() -> None:
    """Run the command line; the entry point `lowlat`."""
    if sys.stdout is None:  # it was closed; the next file opened would get its descriptor
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, _interrupt)
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)  # by default the kernel does not end a container's first process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal's encoding may lack characters of a model's text
    try:
        cli(prog_name="lowlat")
    except SystemExit as end:
        _flush()
        if end.code == INTERRUPTED:
            os._exit(INTERRUPTED)  # a loading thread would abort Python's exit, and an interrupted exec change its code
        raise
    else:
        _flush()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; while torch is imported, whose C code drops what is raised in it, end the process."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        from lowlat.cli.console import print_error_json

        with suppress(Exception):
            print_error_json("interrupted")
            sys.stdout.flush()
            os.write(sys.stderr.fileno(), b"interrupted\n")
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End the process at once, as SIGTERM does to any other."""
    os._exit(128 + number)


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        flush_output(stream)
