"""`lowlat chat`: talk with a running server, line by line; on a terminal with history, from a pipe a line a turn."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lowlat.cli.connecting import Asked, connected, server_options
from lowlat.cli.console import stream_text
from lowlat.cli.generation import Generation, Output
from lowlat.cli.options import sampling_options, sampling_params, sampling_values
from lowlat.errors import Busy, CapacityError, LowlatError, RequestError
from lowlat.ipc import Client

__all__ = ["command"]

HELP = """\
/clear          forget the conversation
/system TEXT    clear, with another system message; without TEXT, with none
/retry          answer the last message again
/quit           end, as does Ctrl-D
A line that ends with \\ goes on in the next. Ctrl-C ends an answer, not the chat.\
"""


@click.command("chat")
@server_options
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@click.option("--plain", is_flag=True, help="Continue each line as text, without chat template or memory.")
@sampling_options
def command(endpoint: str | None, curve_keys: Path | None, system: str | None, plain: bool, **values: Any) -> None:
    """Talk with a running server (`lowlat serve`): it remembers what was said, and answers appear as they come.

    Without a terminal every line of stdin is a message. A model without a chat template continues each line as text.
    """
    if values["logprobs"] is not None:
        raise click.UsageError("--logprobs is for `lowlat generate --connect --json`")
    if plain and system is not None:
        raise click.UsageError("--system needs a chat; leave out --plain")
    sampling_params(values)  # refuses what is out of range before anybody is asked
    with connected(endpoint, curve_keys, "lowlat chat") as client:
        server = client.server
        if not server.tokenizer:
            raise RequestError(
                f"model {server.model!r} has no tokenizer; use `lowlat generate --connect --token-ids 1,2,3`"
            )
        if not plain and not server.has_chat_template:
            if system is not None:
                raise RequestError(f"--system needs a chat template, and model {server.model!r} has none")
            click.echo(f"{server.model} has no chat template: each line is continued as text.", err=True)
            plain = True
        _Chat(client, sampling_values(values), system, plain=plain).run()


class _Chat:
    """One conversation; `messages` is what the server is sent, and so all that it knows."""

    def __init__(self, client: Client, sampling: dict[str, Any], system: str | None, *, plain: bool) -> None:
        self._client = client
        self._sampling = sampling
        self._plain = plain
        self._on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._clear(system)

    def run(self) -> None:
        """Answer lines until there are no more."""
        if self._on_terminal:
            click.secho(f"{self._client.server.model} at {self._client.endpoint}; /help says more", dim=True, err=True)
        for line in _lines(self._on_terminal):
            if not line.strip():
                continue
            try:
                if self._on_terminal and line.startswith("/"):
                    if not self._obey(line):
                        return
                else:
                    self._answer(line)
            except LowlatError as error:
                if not self._on_terminal:
                    raise
                click.echo(f"error: {error}{_advice(error)}", err=True)

    def _clear(self, system: str | None) -> None:
        self._system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._last = ""

    def _obey(self, line: str) -> bool:
        """Do what a command says; False ends the chat."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/clear":
            self._clear(self._system)
        elif name == "/system" and self._plain:
            click.echo("there is no chat template, so no system message", err=True)
        elif name == "/system":
            self._clear(rest.strip() or None)
        elif name == "/retry" and self._last:
            del self._messages[-2:]
            self._answer(self._last)
        elif name == "/help":
            click.echo(HELP, err=True)
        else:
            click.echo(f"{name} cannot be done now; /help lists what can", err=True)
        return True

    def _answer(self, text: str) -> None:
        """Stream an answer; what came of it stays in the conversation, also where it was interrupted."""
        said = [*self._messages, {"role": "user", "content": text}]
        asked = Asked(self._client, text if self._plain else said, self._sampling)
        try:
            generation = asked.run(_write)
        except KeyboardInterrupt:
            click.echo()
            if not self._on_terminal:
                raise
            click.secho("[cancelled]", dim=True, err=True)
            generation = asked.generation
        else:
            click.echo()
            self._close(generation)
        self._last = text
        if not self._plain:
            self._messages = [*said, {"role": "assistant", "content": generation.text or ""}]
        if generation.error is not None:
            raise LowlatError(generation.error)

    def _close(self, generation: Generation) -> None:
        if self._on_terminal and generation.error is None:
            click.secho(f"[{generation.closing_line()}]", dim=True, err=True)


def _write(output: Output) -> None:
    stream_text(output.text or "")


def _lines(on_terminal: bool) -> Iterator[str]:
    """Lines to answer; on a terminal with editing, and a backslash at the end continues a line."""
    if not on_terminal:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    import readline  # noqa: F401  # gives input() history and editing

    pieces: list[str] = []
    while True:
        try:
            line = input("... " if pieces else ">>> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            if not pieces:
                click.secho("Ctrl-D or /quit ends the chat", dim=True, err=True)
            pieces.clear()
            continue
        if line.endswith("\\"):
            pieces.append(line[:-1])
            continue
        yield "\n".join([*pieces, line])
        pieces.clear()


def _advice(error: LowlatError) -> str:
    if isinstance(error, Busy) and error.retry_after_s is not None:
        return f"; try again in {error.retry_after_s:.1f} s"
    if isinstance(error, CapacityError):
        return "; try again later"
    if isinstance(error, RequestError) and "max_context" in str(error):
        return "; /clear forgets the conversation, a lower --max-tokens leaves it more room"
    return ""
