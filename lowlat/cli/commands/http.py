"""`lowlat http`: OpenAI's interface and a page before a running server."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowlat.cli.connecting import server_options
from lowlat.cli.console import print_json
from lowlat.cli.options import json_flag

if TYPE_CHECKING:
    from lowlat.serving.http.server import Address

__all__ = ["command"]

DEFAULT = "127.0.0.1:8000"
SOCKET_MODES = ("600", "660", "666")
DRAIN_S = 10.0  # also a server's default


@click.command("http")
@click.argument("address", default=DEFAULT, metavar="[HOST:]PORT|unix:PATH")
@server_options
@click.option("--http-host", metavar="NAMES", help="Further names under which it is reached, with commas between.")
@click.option("--http-origins", metavar="ORIGINS", help="Other sites whose pages may ask, with commas; * is all.")
@click.option(
    "--http-socket-mode",
    type=click.Choice(SOCKET_MODES),
    default=SOCKET_MODES[0],
    show_default=True,
    help="Who may open the socket file of unix:PATH: its owner, its group, or everybody who reaches its folder.",
)
@click.option(
    "--drain-s",
    type=click.FloatRange(0.0, 3600.0),
    default=DRAIN_S,
    show_default=True,
    help="Seconds that SIGTERM lets answers finish.",
)
@click.option("--roster", type=click.Path(path_type=Path), hidden=True, help="The file of a server of several models.")
@click.option("--parent", type=int, hidden=True, help="A pipe; its other end closes with whoever started this.")
@json_flag("Say that the gateway is open as one JSON object.")
def command(
    address: str, endpoint: str | None, curve_keys: Path | None, http_host: str | None,
    http_origins: str | None, http_socket_mode: str, drain_s: float, roster: Path | None, parent: int | None,
    json_output: bool,
) -> None:  # fmt: skip
    """Start an HTTP gateway to a running server: /v1/chat/completions and more of OpenAI's interface, /metrics, a page.

    Requests need the key in LOWLAT_API_KEY, or else the one that is made and printed at the start. `lowlat serve --http
    8000` does the same next to the server that it starts.
    """
    from lowlat.serving.gateway import check_gateway

    check_gateway(address, http_origins)
    from lowlat.ipc.client import AsyncClient
    from lowlat.ipc.endpoint import parse_endpoint
    from lowlat.serving.http.auth import KEY_VARIABLE, key_of, origins_of
    from lowlat.serving.http.gateway import OneModel, SeveralModels
    from lowlat.serving.http.server import parse_address, run
    from lowlat.serving.models.roster import roster_of

    wanted = parse_address(address, http_socket_mode)
    key, made = key_of(os.environ)
    curve = None
    if curve_keys is not None:
        from lowlat.serving.curve_keys import client_curve

        curve = client_curve(curve_keys)

    def opened(bound: "Address") -> None:
        if bound.path is None:
            page = f"{bound.url()}/#key={key}" if made else f"{bound.url()}/ (the key is {KEY_VARIABLE}'s)"
        else:
            shown = key if made else f"${KEY_VARIABLE}"
            page = (
                f"curl --unix-socket {shlex.quote(str(bound.path))} http://localhost/v1/models "
                f'-H "Authorization: Bearer {shown}"'
            )
        if json_output:
            print_json({"event": "http", "url": bound.url(), "page": page, "key": key if made else None})
        else:
            click.echo(f"{page}\nCtrl-C ends it.")

    hosts = [name.strip() for name in (http_host or "").split(",") if name.strip()]
    client = AsyncClient(endpoint or None, name="lowlat http", curve=curve)
    if roster is None:
        roster = roster_of(client.endpoint)
    path = parse_endpoint(client.endpoint).path
    if parent is None and path is not None and not path.exists():
        click.echo(f"no server is at {client.endpoint} yet: requests are answered with 503 until one is", err=True)
    gateways = OneModel(client) if roster is None else SeveralModels(roster)
    origins = origins_of(http_origins)
    run(gateways, wanted, key=key, hosts=hosts, origins=origins, opened=opened, parent=parent, drain_s=drain_s)
