"""This module asks a running server to let its model sleep or wake, and prints the resulting state."""

from pathlib import Path

import click

from lowlat.cli.connecting import connected, endpoint_of
from lowlat.cli.console import print_json

__all__ = ["change_residence"]

TIMEOUT_S = 600.0


def change_residence(
    model: str | None, endpoint: str | None, curve_keys: Path | None, *, asleep: bool, json_output: bool
) -> None:
    """Have a server's model sleep or wake, and print its state; `model` None: the server's first, or only one."""
    with connected(endpoint_of(endpoint, model), curve_keys, "lowlat sleep" if asleep else "lowlat wake") as client:
        state = client.sleep(TIMEOUT_S) if asleep else client.wake(TIMEOUT_S)
        if json_output:
            print_json({"model": client.server.model, "state": state})
        else:
            click.echo(f"{client.server.model} is {state}")
