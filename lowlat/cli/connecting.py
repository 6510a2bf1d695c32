"""This module connects commands to a server: it has the options that name a server, connects, and sends requests."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from lowlat.cli.generation import Asked
from lowlat.cli.options import CURVE_HELP
from lowlat.cli.paths import FOLDER
from lowlat.errors import RequestError, ServerGone
from lowlat.ipc import Client
from lowlat.ipc.endpoint import default_endpoint, parse_endpoint
from lowlat.options.declaration import options_of
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.serving.models.roster import Roster, roster_path

__all__ = ["ServedModel", "asked", "connected", "endpoint_of", "refuse_the_servers_own", "server_options"]

F = TypeVar("F", bound=Callable[..., Any])


def server_options(function: F) -> F:
    """Add --endpoint, with the alias --connect, and --curve-keys; "" is the default endpoint, None: not given."""
    function = click.option("--curve-keys", type=FOLDER, metavar="DIR", help=CURVE_HELP)(function)
    help_text = "The running server to ask; without ENDPOINT: LOWLAT_ENDPOINT, or your own default socket."
    names = ("--endpoint", "--connect", "endpoint")
    return click.option(*names, is_flag=False, flag_value="", metavar="[ENDPOINT]", help=help_text)(function)


def refuse_the_servers_own(ctx: click.Context, model: Path | None = None) -> None:
    """Raise a usage error for arguments that a running server has fixed: the model, and options of loading one.

    The message also says if a command uses a server because neither MODEL nor an endpoint was given.
    """
    if model is not None:
        raise click.UsageError("MODEL is settled where the server is started; leave it out with --endpoint")
    asked = "with --endpoint"
    if ctx.params.get("endpoint") is None and ctx.params.get("curve_keys") is None:
        asked = "to talk with a running server, or name MODEL"
    options = [*options_of(SpeculativeConfig), *options_of(RuntimeConfig)]
    own = {**{option.key: option.said for option in options}, "trace": "--trace"}
    for name, shown in own.items():
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{shown} is settled where the server is started; leave it out {asked}")


def endpoint_of(endpoint: str | None, model: str | None) -> str:
    """Return the endpoint of a model in a server of several; "" and None: the default endpoint, and the first model.

    Raises RequestError for an unknown model, ServerGone if the server has not several models.
    """
    where = endpoint or default_endpoint()
    if model is None:
        return where
    path = roster_path(where)
    if path is None:
        raise ServerGone(f"{where} has one model; leave out {model!r:.80}", code="gone")
    roster = Roster.read(path)
    found = roster.find(model)
    if found is None:
        known = ", ".join(repr(each.name) for each in roster.models)
        raise RequestError(f"the model {model!r:.80} does not exist; {known} do")
    return found.endpoint


@contextmanager
def connected(endpoint: str | None, curve_keys: Path | None, name: str) -> Iterator[Client]:
    """Connect a client; "" and None mean the default endpoint. Raises ServerGone if no server answers."""
    curve = None
    if curve_keys is not None:
        from lowlat.serving.curve_keys import client_curve

        curve = client_curve(curve_keys)
    client = Client(endpoint or None, name=name, curve=curve)
    socket = parse_endpoint(client.endpoint).path
    if socket is not None and (problem := _why_missing(socket)) is not None:
        raise ServerGone(f"no lowlat server answers at {client.endpoint}: {problem}", code="gone")
    try:
        client.connect()
        yield client
    finally:
        client.close()


def _why_missing(socket: Path) -> str | None:
    """Return why a socket file cannot be connected to, or None; a server makes the file before it loads the model."""
    try:
        socket.stat()
    except PermissionError as error:
        return (
            f"{error.strerror}; its folder is another user's: name the endpoint (--endpoint, LOWLAT_ENDPOINT), or set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )
    except OSError:
        return "there is no such socket; `lowlat serve` starts one"
    return None


class ServedModel:
    """A server's model to chat with."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.name = client.server.model
        self.place = f"at {client.endpoint}"
        self.has_tokenizer = bool(client.server.tokenizer)
        self.has_chat_template = client.server.has_chat_template
        self.advice = client.server.advice

    def ask(self, prompt: str | list[dict[str, Any]], sampling: Mapping[str, Any]) -> Asked:
        """Ask for a text's continuation, or a conversation's next message: the latter may be as long as the context has
        room for where it names no max_tokens, and what a model thinks before is apart from it."""
        options: Any = dict(sampling)
        if not isinstance(prompt, str):
            options = {"parse": "reasoning", "fit_context": "max_tokens" not in sampling, **options}
        return asked(self._client, prompt, options)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return no messages, as a server keeps no conversation."""
        return []

    def open_session(self, path: Path) -> None:
        """Refuse a session's file, as only a model in this process has one. Raises RequestError."""
        raise RequestError(f"{path} is for a model that runs here; a server keeps no conversation's file")

    def keep(self, messages: list[dict[str, Any]]) -> None:
        """Do nothing, as a server keeps no conversation."""


def asked(client: Client, prompt: Any, options: Mapping[str, Any]) -> Asked:
    """A request to the server, under way."""
    given: Any = options
    server = client.server
    return Asked(
        client.generate(prompt, **given), has_text=bool(server.tokenizer), max_context=server.limits.max_context
    )
