"""This module answers /v1/models, /health, /ready, /metrics, /lowlat/stats and /version."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lowlat.errors import ServerGone
from lowlat.ipc.messages import Pong, Welcome
from lowlat.serving.http.gateway import Gateway, Gateways, gateways_of
from lowlat.serving.http.metrics import CONTENT_TYPE, exposition
from lowlat.serving.models.roster import Listed

__all__ = ["health", "metrics", "model", "models", "ready", "stats", "version"]

AWAKE = "awake"
STALLED_S = 10.0  # a step takes milliseconds; the server's own watchdog ends one that hangs


async def models(request: Request) -> Response:
    """List the models that are served, and which of them are awake."""
    gateways = gateways_of(request)
    listed = gateways.listed()
    if listed is None:
        return JSONResponse({"object": "list", "data": [await _described(await gateways.of(None))]})
    found = [await _described_of(gateways, each) for each in listed]
    return JSONResponse({"object": "list", "data": found})


async def model(request: Request) -> Response:
    """Show a model, by its name."""
    gateways, name = gateways_of(request), request.path_params["name"]
    listed = next((each for each in gateways.listed() or () if each.name == name), None)
    if listed is not None:
        return JSONResponse(await _described_of(gateways, listed))
    gateway = await gateways.of(name)
    await gateway.serving(name)
    return JSONResponse(await _described(gateway))


async def version(request: Request) -> Response:
    """The server's version of lowlat."""
    server = await (await _asked(request)).server()
    return JSONResponse({"version": server.server.rpartition(" ")[2]})


async def _asked(request: Request) -> Gateway:
    """The model that the query names, else the first one that answers."""
    return await gateways_of(request).of(request.query_params.get("model"))


async def _described(gateway: Gateway) -> dict[str, Any]:
    server, state = await gateway.server(), (await gateway.health()).state
    return _described_as(gateway, server, AWAKE if state == "serving" else state)


def _described_as(gateway: Gateway, server: Welcome, state: str) -> dict[str, Any]:
    return {
        **_model(server.model, gateway.created),
        "max_model_len": server.limits.max_context,
        "state": state,
    }


async def _described_of(gateways: Gateways, listed: Listed) -> dict[str, Any]:
    """Describe a model of several, with the state that its supervisor knows; asking a dead process would take time.

    A model that does not answer has only its state and the problem.
    """
    if listed.answers:
        try:
            gateway = await gateways.of(listed.name)
            return _described_as(gateway, gateway.known or await gateway.server(), listed.state)
        except ServerGone:  # it is ending, and its supervisor does not know yet
            listed = Listed(listed.name, listed.endpoint, "down")
    problem = {} if listed.problem is None else {"problem": listed.problem}
    return {**_model(listed.name, 0), "state": listed.state, **problem}


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "lowlat"}


async def health(request: Request) -> Response:
    """Answer 200 if the server answers and steps, else 503; with several models, if all loaded ones do.

    The query may name a model.
    """
    pongs = await _pongs(request)
    return _pong(pongs, well=all(pong.last_step_age_s < STALLED_S for pong in pongs))


async def ready(request: Request) -> Response:
    """Answer 200 if the server takes requests, else 503; with several models, if at least one does."""
    pongs = await _pongs(request)
    return _pong(pongs, well=any(pong.state != "draining" and pong.last_step_age_s < STALLED_S for pong in pongs))


async def _pongs(request: Request) -> list[Pong]:
    gateways, name = gateways_of(request), request.query_params.get("model")
    listed = gateways.listed()
    if name is not None or listed is None:
        return [await (await gateways.of(name)).health()]
    found = []
    for each in listed:
        if each.answers:
            with suppress(ServerGone):  # it is ending, and its supervisor does not know yet
                found.append(await (await gateways.of(each.name)).health())
    if not found:
        raise ServerGone(f"none of the models {', '.join(each.name for each in listed)} answers", code="gone")
    return found


def _pong(pongs: Sequence[Pong], *, well: bool) -> Response:
    age = max(pong.last_step_age_s for pong in pongs)
    return JSONResponse({"state": pongs[0].state, "last_step_age_s": age}, 200 if well else 503)


async def metrics(request: Request) -> Response:
    """Show the figures of every model that is loaded, for Prometheus."""
    gateways = gateways_of(request)
    listed = gateways.listed()
    if listed is None:
        return Response(exposition([await (await gateways.of(None)).stats()]), media_type=CONTENT_TYPE)
    found = []
    for each in listed:
        if each.answers:
            with suppress(ServerGone):
                found.append(await (await gateways.of(each.name)).stats())
    return Response(exposition(found), media_type=CONTENT_TYPE)


async def stats(request: Request) -> Response:
    """Show a server's figures and description unchanged, for the page; the query may name the model."""
    gateway = await _asked(request)
    server = msgspec.to_builtins(await gateway.server())
    return JSONResponse({"server": server, "stats": await gateway.stats()})
