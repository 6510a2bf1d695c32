"""`lowlat sleep`: a running server's model gives its memory back."""

from pathlib import Path

import click

from lowlat.cli.connecting import server_options
from lowlat.cli.options import as_json
from lowlat.cli.residence import change_residence

__all__ = ["command"]


@click.command("sleep")
@click.argument("model", required=False, metavar="[MODEL]")
@server_options
@as_json
def command(model: str | None, endpoint: str | None, curve_keys: Path | None, json_output: bool) -> None:
    """Have a model give its memory on the device back, as soon as nothing runs; its next request wakes it.

    Weights go to host memory, cached prefixes to the tiers that there are (host_cache_gib, cache_dir). A server of one
    model must have been started with --set can_sleep=true.

    MODEL is a name in `[[models]]` of the server's file; without it the server's first, or only one.
    """
    change_residence(model, endpoint, curve_keys, asleep=True, json_output=json_output)
