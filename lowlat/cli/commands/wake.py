"""`lowlat wake`: a running server's model takes its memory again."""

from pathlib import Path

import click

from lowlat.cli.connecting import connected, endpoint_of, server_options
from lowlat.cli.console import print_json
from lowlat.cli.options import as_json

__all__ = ["command"]

TIMEOUT_S = 600.0


@click.command("wake")
@click.argument("model", required=False, metavar="[MODEL]")
@server_options
@as_json
def command(model: str | None, endpoint: str | None, curve_keys: Path | None, json_output: bool) -> None:
    """Have a model that sleeps take its memory on the device again; of several models others may sleep for it.

    MODEL is a name in `[[models]]` of the server's file; without it the server's first, or only one.
    """
    with connected(endpoint_of(endpoint, model), curve_keys, "lowlat wake") as client:
        state = client.wake(TIMEOUT_S)
        if json_output:
            print_json({"model": client.server.model, "state": state})
        else:
            click.echo(f"{client.server.model} is {state}")
