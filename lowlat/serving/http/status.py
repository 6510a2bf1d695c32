"""Models, health, figures and version: /v1/models, /health, /ready, /metrics, /lowlat/stats, /version."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lowlat.ipc.messages import Pong
from lowlat.serving.http.gateway import Gateway
from lowlat.serving.http.metrics import CONTENT_TYPE, exposition

__all__ = ["health", "metrics", "model", "models", "ready", "stats", "version"]

STALLED_S = 10.0  # a step takes milliseconds; the server itself gives up one that hangs


async def models(request: Request) -> Response:
    """List the one model that is served."""
    gateway: Gateway = request.app.state.gateway
    server = await gateway.server()
    return JSONResponse({"object": "list", "data": [_model(gateway, server.model, server.limits.max_context)]})


async def model(request: Request) -> Response:
    """Show the model, by its name."""
    gateway: Gateway = request.app.state.gateway
    server = await gateway.serving(request.path_params["name"])
    return JSONResponse(_model(gateway, server.model, server.limits.max_context))


async def version(request: Request) -> Response:
    """The server's version of lowlat."""
    gateway: Gateway = request.app.state.gateway
    server = await gateway.server()
    return JSONResponse({"version": server.server.rpartition(" ")[2]})


def _model(gateway: Gateway, name: str, max_context: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "lowlat",
        "max_model_len": max_context,
    }


async def health(request: Request) -> Response:
    """Say whether the server answers and steps: 200, or 503."""
    gateway: Gateway = request.app.state.gateway
    pong = await gateway.health()
    return _pong(pong, well=pong.last_step_age_s < STALLED_S)


async def ready(request: Request) -> Response:
    """Say whether the server takes requests: 200, or 503."""
    gateway: Gateway = request.app.state.gateway
    pong = await gateway.health()
    return _pong(pong, well=pong.state != "draining" and pong.last_step_age_s < STALLED_S)


def _pong(pong: Pong, *, well: bool) -> Response:
    return JSONResponse({"state": pong.state, "last_step_age_s": pong.last_step_age_s}, 200 if well else 503)


async def metrics(request: Request) -> Response:
    """Show the server's figures for Prometheus."""
    gateway: Gateway = request.app.state.gateway
    return Response(exposition(await gateway.stats()), media_type=CONTENT_TYPE)


async def stats(request: Request) -> Response:
    """Show the server's figures and description as they are, for the page."""
    gateway: Gateway = request.app.state.gateway
    server = msgspec.to_builtins(await gateway.server())
    return JSONResponse({"server": server, "stats": await gateway.stats()})
