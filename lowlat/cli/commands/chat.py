"""`lowlat chat`: talk with a model, here or in a server; on a terminal with history, from a pipe a line a turn."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import click

from lowlat.cli.connecting import ServedModel, connected, refuse_the_servers_own, server_options
from lowlat.cli.console import stream_text
from lowlat.cli.generation import Asked, Generation
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import (
    asked_sampling,
    bundled,
    defaults_option,
    runtime_options,
    runtime_values,
    sampling_options,
    sampling_params,
    sampling_values,
    speculation_options,
    speculative_config,
)
from lowlat.cli.paths import NEW_FILE, check_model
from lowlat.errors import Busy, CapacityError, LowlatError, RequestError, ServerGone
from lowlat.ipc import Chunk

__all__ = ["command"]

HELP = """\
/clear          forget the conversation
/system TEXT    clear, with another system message; without TEXT, with none
/retry          answer the last message again
/quit           end, as does Ctrl-D
A line ending with \\ goes on in the next. Ctrl-C ends an answer, not the chat.\
"""
SESSION_HELP = "Go on with a file's conversation, and keep it there; its state is not read again."
OFFER = "name a model (`lowlat chat ORG/NAME`), or let `lowlat chat --demo` fetch a small one, once (93 MB)"


class _Model(Protocol):
    """The model as a chat needs it: see `ServedModel`, `LocalModel`."""

    name: str
    place: str
    has_tokenizer: bool
    has_chat_template: bool

    @property
    def advice(self) -> Mapping[str, int | float]: ...
    @property
    def messages(self) -> list[dict[str, Any]]: ...
    def open_session(self, path: Path) -> None: ...
    def keep(self, messages: list[dict[str, Any]]) -> None: ...
    def ask(self, prompt: str | list[dict[str, Any]], sampling: Mapping[str, Any]) -> Asked: ...


class _Help(SectionedCommand):
    """A command whose help ends with what may be typed in the chat."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lines that are commands."""
        with formatter.section("In the chat"):
            for line in HELP.splitlines():
                formatter.write(f"  {line}\n")


@click.command("chat", cls=_Help)
@click.argument("model", type=click.Path(path_type=Path), required=False)
@server_options
@click.option("--demo", is_flag=True, help="Talk with a small chat model, fetched once (93 MB).")
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@click.option("--session", type=NEW_FILE, metavar="FILE", help=SESSION_HELP)
@click.option("--plain", is_flag=True, help="Continue each line as text; no chat template, no memory.")
@sampling_options
@defaults_option
@speculation_options
@runtime_options
def command(model: Path | None, endpoint: str | None, curve_keys: Path | None, demo: bool, **values: Any) -> None:
    """Talk with MODEL, a Hugging Face directory or ORG/NAME; without one, with a running server (`lowlat serve`).

    It remembers what was said. Without a terminal every line of stdin is a message. A model without a chat template
    continues each line as text.
    """
    system, plain, session = values["system"], values["plain"], values.pop("session")
    if values["logprobs"] is not None:
        raise click.UsageError("--logprobs is for `lowlat generate --json`")
    if plain and system is not None:
        raise click.UsageError("--system needs a chat; leave out --plain")
    if plain and session is not None:
        raise click.UsageError("--session needs a chat; leave out --plain")
    if system is not None and session is not None and session.exists():
        raise click.UsageError("--session has its system message; leave out --system, or name another file")
    local = demo or model is not None
    if session is not None and not local:
        raise click.UsageError("--session keeps the state of a model that runs here: name MODEL, or give --demo")
    if local and (endpoint is not None or curve_keys is not None):
        raise click.UsageError("MODEL and --demo run here; leave out --endpoint and --curve-keys to talk with them")
    if demo and model is not None:
        raise click.UsageError("give MODEL or --demo, not both")
    if not local:
        refuse_the_servers_own(click.get_current_context())
    sampling_params(values)  # refuse values out of range before the model is asked
    with ExitStack() as stack:
        if not local:
            try:
                client = stack.enter_context(connected(endpoint, curve_keys, "lowlat chat"))
            except ServerGone as error:
                if endpoint is not None or curve_keys is not None:
                    raise
                _offer(error)
                local = demo = True
        answerer = _load(stack, model, demo, values) if local else ServedModel(client)
        sampling = sampling_values(values) if local else asked_sampling(values)
        if session is not None:
            answerer.open_session(session)
        _talk(answerer, sampling, system, plain=plain)


def _offer(error: ServerGone) -> None:
    """Ask on a terminal whether to fetch the small model. Raises ServerGone that says what else there is."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ServerGone(f"{error}; or {OFFER}") from error
    click.echo(str(error), err=True)
    if not click.confirm("Fetch a small chat model instead, once (93 MB), and talk with it?", err=True):
        raise ServerGone(f"nobody to talk with: {OFFER}") from error


def _load(stack: ExitStack, model: Path | None, demo: bool, values: dict[str, Any]) -> _Model:
    """A model of this process, until the stack is closed. Raises ConfigError."""
    if model is not None:
        check_model(model)
    speculative = speculative_config(values, bundled("chat_head") if demo else None)
    options = {"max_context": None, **runtime_values(values, max_batch=1)}

    from lowlat.cli.local import LocalModel
    from lowlat.cli.running import load_runtime
    from lowlat.models.advice import sampling_defaults

    if demo or model is None:
        from lowlat.cli.commands.demo import chat_model

        model = chat_model(None)
    runtime = stack.enter_context(load_runtime(model, speculative, **options))
    return LocalModel(runtime, sampling_defaults(runtime.directory, values["sampling_defaults"]))


def _talk(model: _Model, sampling: dict[str, Any], system: str | None, *, plain: bool) -> None:
    """Chat, or continue lines where the model has no chat template. Raises RequestError without a tokenizer."""
    if not model.has_tokenizer:
        raise RequestError(f"model {model.name!r} has no tokenizer; use `lowlat generate` with --token-ids 1,2,3")
    if not plain and not model.has_chat_template:
        if system is not None:
            raise RequestError(f"--system needs a chat template, and model {model.name!r} has none")
        click.echo(f"{model.name} has no chat template: each line is continued as text.", err=True)
        plain = True
    _Chat(model, sampling, system, plain=plain).run()


class _Chat:
    """One conversation; `messages` is what the model is given, and so all that it knows."""

    def __init__(self, model: _Model, sampling: dict[str, Any], system: str | None, *, plain: bool) -> None:
        self._model = model
        self._sampling = sampling
        self._plain = plain
        self._on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._messages: list[dict[str, Any]] = []
        self._clear(system)
        if said := model.messages:
            self._messages = said

    def run(self) -> None:
        """Answer lines until there are no more; the model keeps the conversation, where it has a place for it."""
        try:
            self._run()
        finally:
            self._model.keep(self._messages)

    def _run(self) -> None:
        if self._on_terminal:
            click.secho(f"{self._model.name} {self._model.place}; /help says more", dim=True, err=True)
            left = {name: value for name, value in self._model.advice.items() if name not in self._sampling}
            if left:
                advice = ", ".join(f"{name} {value:g}" for name, value in left.items())
                click.secho(f"{advice}, as its authors advise (--sampling-defaults)", dim=True, err=True)
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
        elif name == "/retry":
            click.echo("/retry answers the last message again, and there is none", err=True)
        else:
            click.echo(f"{name} is no command; /help lists them", err=True)
        return True

    def _answer(self, text: str) -> None:
        """Stream an answer; what came of it stays in the conversation, also where it was interrupted."""
        said = [*self._messages, {"role": "user", "content": text}]
        asked = self._model.ask(text if self._plain else said, self._sampling)
        try:
            generation = asked.run(_Writer())
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
        elif generation.finish_reason == "length":
            click.echo(f"the answer was {generation.ending()}", err=True)


class _Writer:
    """Writes an answer to stdout; what the model thinks before it, dim, to a terminal alone."""

    def __init__(self) -> None:
        self._thought = False

    def __call__(self, chunk: Chunk) -> None:
        """Write what came."""
        if chunk.reasoning_content and sys.stdout.isatty():
            self._thought = True
            stream_text(chunk.reasoning_content, dim=True)
        if chunk.text and self._thought:
            self._thought = False
            stream_text("\n\n")
        stream_text(chunk.text)


def _lines(on_terminal: bool) -> Iterator[str]:
    """Lines to answer; on a terminal with editing, and a backslash at the end continues a line."""
    if not on_terminal:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise RequestError(f"<stdin>: line {number} is not UTF-8: byte {error.start}") from error
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
