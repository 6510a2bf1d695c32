"""`lowlat sleep`: a running server's model gives its memory back."""

from pathlib import Path

import click

from lowlat.cli.connecting import connected, endpoint_of, server_options
from lowlat.cli.console import print_json
from lowlat.cli.options import as_json

__all__ = ["command"]

TIMEOUT_S = 600.0


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
    with connected(endpoint_of(endpoint, model), curve_keys, "lowlat sleep") as client:
        state = client.sleep(TIMEOUT_S)
        if json_output:
            print_json({"model": client.server.model, "state": state})
        else:
            click.echo(f"{client.server.model} is {state}")
