"""This module makes the gateway's ASGI application, with its routes, its guard and its page."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lowlat.errors import LowlatError
from lowlat.serving.http import status
from lowlat.serving.http.auth import Guard
from lowlat.serving.http.errors import ApiError, answer_error
from lowlat.serving.http.gateway import Gateways
from lowlat.serving.http.openai import chat, completions, responses, tokenize
from lowlat.serving.http.openai.request_ids import RequestIds
from lowlat.serving.http.paths import Paths

__all__ = ["make_app"]

PAGE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript"}
FILES = {
    "/" if file.name == "index.html" else f"/{file.relative_to(PAGE)}": (file, f"{KINDS[file.suffix]}; charset=utf-8")
    for file in sorted(PAGE.rglob("*"))
    if file.suffix in KINDS
}
OPEN_PATHS = (*FILES, "/favicon.ico", "/health", "/ready")
HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
SHOWN = ["x-request-id", "retry-after", "retry-after-ms"]  # headers that pages of other origins may read
SAFE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(
    gateways: Gateways,
    *,
    key: str | None,
    host: str | None,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
) -> Starlette:
    """The application.

    gateways  connections to the servers of the models; they are closed with the application
    key     the key that requests must have, except for the page's files, /health and /ready; None: no key
    host    the host that it is bound to, None behind a proxy; hosts: further names under which clients reach it
    origins origins of other sites whose pages may use it, with the key like anybody; "*": all
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await gateways.close()

    routes = [
        Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
        Route("/v1/completions", completions.completions, methods=["POST"]),
        Route("/v1/responses", responses.responses, methods=["POST"]),
        *(Route(f"{prefix}/tokenize", tokenize.tokenize, methods=["POST"]) for prefix in ("", "/v1")),
        *(Route(f"{prefix}/detokenize", tokenize.detokenize, methods=["POST"]) for prefix in ("", "/v1")),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/health", status.health),
        Route("/ready", status.ready),
        Route("/metrics", status.metrics),
        Route("/version", status.version),
        Route("/lowlat/stats", status.stats),
        Route("/favicon.ico", _no_icon),
        *(Route(path, _file) for path in FILES),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestIds),
            Middleware(Paths),
            *_cross_origin(origins),
            Middleware(Guard, key=key, host=host, hosts=hosts, open_paths=OPEN_PATHS),
        ],
        exception_handlers={
            ApiError: answer_error,
            LowlatError: answer_error,
            HTTPException: _answer_http,
            Exception: answer_error,
        },
        lifespan=lifespan,
    )
    app.state.gateways = gateways
    return app


def _cross_origin(origins: Iterable[str]) -> list[Middleware]:
    """Return middleware that lets pages of other sites use the gateway, and also read the guard's refusals."""
    allowed = list(origins)
    if not allowed:
        return []
    methods, headers = ["GET", "HEAD", "POST"], ["*"]
    return [
        Middleware(
            CORSMiddleware, allow_origins=allowed, allow_methods=methods, allow_headers=headers, expose_headers=SHOWN
        )
    ]


async def _file(request: Request) -> Response:
    name, kind = FILES[request.url.path]
    return Response((PAGE / name).read_bytes(), media_type=kind, headers=SAFE_HEADERS)


async def _no_icon(request: Request) -> Response:
    return Response(status_code=204)


async def _answer_http(request: Request, error: Exception) -> Response:
    """An unknown path or method."""
    code, detail, headers = 500, "", None
    if isinstance(error, HTTPException):
        code, detail, headers = error.status_code, error.detail, error.headers
    message = f"{request.method} {request.url.path!s:.100}: {detail}"
    if code == 404 and request.url.path.startswith("/v1/"):
        message += "; served are /v1/chat/completions, /v1/completions, /v1/responses and /v1/models"
    elif code == 404:
        message += "; clients' base URL is the gateway's address and /v1, as in /v1/chat/completions"
    return ApiError(code, message, code=HTTP_CODES.get(code), headers=dict(headers or {})).response()
