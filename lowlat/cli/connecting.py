"""A client for commands: the options that name a server, a connection, one request on it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from lowlat.cli.generation import Generation, Output
from lowlat.cli.options import CURVE_HELP
from lowlat.cli.paths import FOLDER
from lowlat.errors import ServerGone, StreamError
from lowlat.ipc import Chunk, Client
from lowlat.ipc.endpoint import parse_endpoint
from lowlat.ipc.engine import TokenLogprobs
from lowlat.options.config import RuntimeConfig, SpeculativeConfig
from lowlat.options.declaration import options_of

__all__ = ["Asked", "ServedModel", "connected", "refuse_the_servers_own", "server_options"]

F = TypeVar("F", bound=Callable[..., Any])


def server_options(function: F) -> F:
    """Add --endpoint, with the alias --connect, and --curve-keys; "" is the default endpoint, None: not given."""
    function = click.option("--curve-keys", type=FOLDER, metavar="DIR", help=CURVE_HELP)(function)
    help_text = "The running server to ask; without ENDPOINT: LOWLAT_ENDPOINT, or your own default socket."
    names = ("--endpoint", "--connect", "endpoint")
    return click.option(*names, is_flag=False, flag_value="", metavar="[ENDPOINT]", help=help_text)(function)


def refuse_the_servers_own(ctx: click.Context, model: Path | None = None) -> None:
    """Raise a usage error for what was settled when the server started: the model, and options of loading one."""
    if model is not None:
        raise click.UsageError("MODEL is settled where the server is started; leave it out with --endpoint")
    options = [*options_of(SpeculativeConfig), *options_of(RuntimeConfig)]
    own = {**{option.key: option.said for option in options}, "trace": "--trace"}
    for name, shown in own.items():
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{shown} is settled where the server is started; leave it out with --endpoint")


@contextmanager
def connected(endpoint: str | None, curve_keys: Path | None, name: str) -> Iterator[Client]:
    """A connected client; "" and None mean the default endpoint. Raises ServerGone where none answers."""
    curve = None
    if curve_keys is not None:
        from lowlat.serving.curve_keys import client_curve

        curve = client_curve(curve_keys)
    client = Client(endpoint or None, name=name, curve=curve)
    socket = parse_endpoint(client.endpoint).path
    if socket is not None and not socket.exists():  # a server makes it as it begins, before it loads
        raise ServerGone(
            f"no lowlat server answers at {client.endpoint}: there is no such socket; `lowlat serve` starts one",
            code="gone",
        )
    try:
        client.connect()
        yield client
    finally:
        client.close()


@dataclass(frozen=True)
class _Output:
    """A chunk as a step's output; without a tokenizer its text is None, not empty."""

    chunk: Chunk
    text: str | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.chunk.token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.chunk.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.chunk.stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.chunk.logprobs

    @property
    def simulated(self) -> bool:
        return self.chunk.simulated


class Asked:
    """One request to the server; `generation` is its outcome so far, also where it was interrupted."""

    def __init__(self, client: Client, prompt: Any, sampling: Mapping[str, Any]) -> None:
        self.generation = Generation()
        self._has_text = bool(client.server.tokenizer)
        self._chunks = client.generate(prompt, **sampling)

    def run(self, on_output: Callable[[Output], None] | None = None) -> Generation:
        """Run the request to its end, handing on each output; one that breaks off keeps its outcome, with `error`.

        Raises RequestError, Busy for a request that was not taken.
        """
        generation = self.generation
        try:
            with self._chunks as chunks:
                for chunk in chunks:
                    output = _Output(chunk, chunk.text if self._has_text else None)
                    generation.add(output)
                    generation.metrics = chunk.metrics or {}
                    if on_output is not None:
                        on_output(output)
        except StreamError as error:
            generation.finish_reason, generation.error = "error", str(error)
        return generation


class ServedModel:
    """A server's model to chat with."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.name = client.server.model
        self.place = client.endpoint
        self.has_tokenizer = bool(client.server.tokenizer)
        self.has_chat_template = client.server.has_chat_template
        self.advice = client.server.advice

    def ask(self, prompt: str | list[dict[str, Any]], sampling: Mapping[str, Any]) -> Asked:
        """A request for a text's continuation or a conversation's next message, which has what the context has room
        for where it names no max_tokens."""
        fit = not isinstance(prompt, str) and "max_tokens" not in sampling
        return Asked(self._client, prompt, {**sampling, "fit_context": fit})

    def writer(self, sampling: Mapping[str, Any]) -> Callable[[Output], None] | None:
        """How an answer is shown: as it comes."""
        return None

    def answer_of(self, generation: Generation) -> str:
        """The text that stays in the conversation."""
        return generation.text or ""
