"""Models, health, and figures: /v1/models, /health, /ready, /metrics, /lowlat/stats."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lowlat.ipc.messages import Pong
from lowlat.serving.http.door import Door
from lowlat.serving.http.metrics import CONTENT_TYPE, exposition

__all__ = ["health", "metrics", "model", "models", "ready", "stats"]

STALLED_S = 10.0  # a step takes milliseconds; the server itself gives up one that hangs


async def models(request: Request) -> Response:
    """List the one model that is served."""
    door: Door = request.app.state.door
    server = await door.server()
    return JSONResponse({"object": "list", "data": [_model(door, server.model, server.limits.max_context)]})


async def model(request: Request) -> Response:
    """Show the model, by its name."""
    door: Door = request.app.state.door
    server = await door.serving(request.path_params["name"])
    return JSONResponse(_model(door, server.model, server.limits.max_context))


def _model(door: Door, name: str, max_context: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": door.created,
        "owned_by": "lowlat",
        "max_model_len": max_context,
    }


async def health(request: Request) -> Response:
    """Say whether the server answers and steps: 200, or 503."""
    door: Door = request.app.state.door
    pong = await door.health()
    return _pong(pong, well=pong.last_step_age_s < STALLED_S)


async def ready(request: Request) -> Response:
    """Say whether the server takes requests: 200, or 503."""
    door: Door = request.app.state.door
    pong = await door.health()
    return _pong(pong, well=pong.state == "serving" and pong.last_step_age_s < STALLED_S)


def _pong(pong: Pong, *, well: bool) -> Response:
    return JSONResponse({"state": pong.state, "last_step_age_s": pong.last_step_age_s}, 200 if well else 503)


async def metrics(request: Request) -> Response:
    """Show the server's figures for Prometheus."""
    door: Door = request.app.state.door
    return Response(exposition(await door.stats()), media_type=CONTENT_TYPE)


async def stats(request: Request) -> Response:
    """Show the server's figures and description as they are, for the page."""
    door: Door = request.app.state.door
    server = msgspec.to_builtins(await door.server())
    return JSONResponse({"server": server, "stats": await door.stats()})
