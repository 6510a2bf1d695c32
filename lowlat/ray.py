"""An application for Ray Serve: every replica runs a server of its own and the HTTP gateway before it.

    serve run lowlat.ray:app
    serve run lowlat.ray:build model=ORG/NAME num_replicas=2 num_gpus=1

Ray places replicas, restarts them and sends them requests; those of one session (header x-session-id) go to the same
replica, whose prefix cache then holds their conversation. A replica that is taken away finishes its running requests.
"""

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from lowlat.errors import ConfigError, DeviceError
from lowlat.ipc.client import AsyncClient
from lowlat.serving.config import SETTINGS, ServeConfig
from lowlat.serving.http.app import make_app
from lowlat.serving.http.auth import KEY_VARIABLE, checked_key
from lowlat.serving.http.gateway import OneModel

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["Replica", "build"]

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
DRAIN_MARGIN_S = 5.0
HEALTH_S = 5.0
OWN = ("num_replicas", "num_gpus")  # arguments of `build` that are no settings
GIVEN_HERE = (
    "endpoint",
    "http",
    "http_host",
    "http_origins",
    "http_socket_mode",
    "allow_uid",
    "curve_keys",
    "log_format",
)  # a replica decides these


class Replica:
    """One server and its gateway, in the process of a Ray Serve replica.

    settings  settings of `lowlat serve` by name, as in its environment
    key       the bearer token that every request must carry; None: none is required
    Raises ConfigError where the server refuses to start, with the last line that it wrote.
    """

    def __init__(self, settings: Mapping[str, str], key: str | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lowlat-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._server, self.facts = _start(settings, f"ipc://{folder / 'server.sock'}", folder / "log")
        self._ended = weakref.finalize(self, _end, self._server, self._folder)
        self._client = AsyncClient(self.facts["endpoint"])
        self._gateway = make_app(OneModel(self._client), key=key, host=None)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as the HTTP gateway does."""
        await self._gateway(scope, receive, send)

    async def check_health(self) -> None:
        """Raise DeviceError where the server has ended, ServerGone where it does not answer: Ray starts another."""
        code = self._server.poll()
        if code is not None:
            raise DeviceError(f"the server of this replica ended with code {code}")
        await self._client.health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Running and waiting requests, for a policy of autoscaling."""
        pong = await self._client.health()
        return {"num_running": float(pong.num_running), "num_waiting": float(pong.num_waiting)}

    def close(self) -> None:
        """Let the server drain, and end it."""
        self._ended()


def build(arguments: Mapping[str, Any]) -> "Application":
    """Build the application from settings of `lowlat serve` by name, num_replicas (1) and num_gpus of a replica.

    num_gpus  1 by default; 0 for a machine without any. A setting that `arguments` leaves out is taken from the
              environment
    Raises ConfigError for an unknown or ill-typed setting.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    environment = {name: value for name, value in os.environ.items() if name.startswith("LOWLAT_")}
    settings = {name: str(value) for name, value in arguments.items() if name not in OWN}
    for name in GIVEN_HERE:
        if name in settings:
            raise ConfigError(f"{name} is a replica's own: it cannot be set for all of them")
        environment.pop(f"LOWLAT_{name.upper()}", None)
    unknown = sorted(set(settings) - {name for option in SETTINGS.values() for name in (option.key, *option.aliases)})
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r:.80}; known are {', '.join((*OWN, *SETTINGS))}")
    given = environment.pop(KEY_VARIABLE, "")
    key = checked_key(given) if given else None
    variables = environment | {f"LOWLAT_{name.upper()}": value for name, value in settings.items()}
    config = ServeConfig.gather({}, variables)
    limits = config.limits()
    deployment = serve.deployment(
        name="lowlat",
        num_replicas=int(arguments.get("num_replicas", 1)),
        ray_actor_options={"num_gpus": float(arguments.get("num_gpus", 1))},
        max_ongoing_requests=config["max_batch"] + limits.max_queue,
        graceful_shutdown_timeout_s=limits.drain_s + DRAIN_MARGIN_S,
        health_check_period_s=HEALTH_S,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    return deployment(serve.ingress(_asgi)(Replica)).bind(variables, key)


def __getattr__(name: str) -> Any:
    """`app`: the application that the environment describes, with LOWLAT_NUM_REPLICAS and LOWLAT_NUM_GPUS."""
    if name == "app":
        return build({own: os.environ[f"LOWLAT_{own.upper()}"] for own in OWN if f"LOWLAT_{own.upper()}" in os.environ})
    raise AttributeError(name)


def _asgi() -> ASGIApp:
    """The application that Ray calls in the process of each replica, first of all before there is a `Replica`."""
    return Starlette(routes=[Mount("/", _answer)])


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer by the replica in whose process this is."""
    from ray import serve

    await serve.get_replica_context().servable_object.answer(scope, receive, send)


def _start(settings: Mapping[str, str], endpoint: str, log: Path) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """A server that is ready, and what it says of itself. Raises ConfigError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOWLAT_")}
    command = [sys.executable, "-m", "lowlat.cli", "serve", "--json", "--endpoint", endpoint]
    with log.open("wb") as errors:
        server = subprocess.Popen(
            command, env={**environment, **settings}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
    line = b"" if server.stdout is None else server.stdout.readline()
    if not line:
        code = server.wait()
        raise ConfigError(f"the server ended with code {code}: {log.read_text(errors='replace').strip()[-2000:]}")
    facts: dict[str, Any] = json.loads(line)
    return server, facts


def _end(server: subprocess.Popen[bytes], folder: "tempfile.TemporaryDirectory[str]") -> None:
    server.terminate()
    server.wait()
    folder.cleanup()
