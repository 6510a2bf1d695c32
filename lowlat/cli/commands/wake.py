"""`lowlat wake`: a running server's model takes its memory again."""

from pathlib import Path

import click

from lowlat.cli.connecting import server_options
from lowlat.cli.options import as_json
from lowlat.cli.residence import change_residence

__all__ = ["command"]


@click.command("wake")
@click.argument("model", required=False, metavar="[MODEL]")
@server_options
@as_json
def command(model: str | None, endpoint: str | None, curve_keys: Path | None, json_output: bool) -> None:
    """Have a model that sleeps take its memory on the device again; of several models others may sleep for it.

    MODEL is a name in `[[models]]` of the server's file; without it the server's first, or only one.
    """
    change_residence(model, endpoint, curve_keys, asleep=False, json_output=json_output)
