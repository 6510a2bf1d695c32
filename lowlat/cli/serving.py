"""This module runs a server for `lowlat serve`: it loads with bars, prints how to reach it, and serves until it ends.

The decode thread imports torch, after the server has locked its endpoint. So a taken endpoint is refused at once.
"""

import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import lowlat
from lowlat.cli.collection import rare_collections
from lowlat.cli.console import format_bytes, print_json
from lowlat.cli.options import bundled
from lowlat.cli.paths import check_model
from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import Endpoint, default_endpoint
from lowlat.ipc.engine import EngineInfo
from lowlat.ipc.server import Server
from lowlat.ipc.signals import ending_signals
from lowlat.options.directories import make_private
from lowlat.serving.codec import ServingCodec
from lowlat.serving.config import ServeConfig
from lowlat.serving.descriptors import raise_descriptor_limit
from lowlat.serving.gateway import check_gateway, http_gateway
from lowlat.serving.logs import serving_log
from lowlat.serving.models.worker import Worker

if TYPE_CHECKING:
    from lowlat.engine.runtime import Runtime
    from lowlat.serving.engine import RuntimeEngine

__all__ = ["BUNDLED", "CHAT", "Pair", "serve"]

logger = logging.getLogger("lowlat.serving")
SAMPLING = (
    "requests that leave sampling open get {}, as the model's authors advise; sampling_defaults 'lowlat' turns it off"
)


@dataclass(frozen=True)
class Pair:
    """The default model and draft model, which are served if the settings name none.

    target       returns the model's directory, and downloads it if necessary
    draft_model  returns the draft model's directory
    name         the model's name for clients; None: its directory's name
    """

    target: Callable[[], Path]
    draft_model: Callable[[], Path]
    name: str | None


def _chat_model() -> Path:
    from lowlat.cli.commands.demo import chat_model

    return chat_model(None)


BUNDLED = Pair(partial(bundled, "target"), partial(bundled, "head"), "lowlat-demo")
CHAT = Pair(_chat_model, partial(bundled, "chat_head"), "SmolLM2-135M-Instruct")
SWITCH_INTERVAL_S = 0.0005  # the longest wait for a computing thread's GIL; Python's default is 5 ms


def serve(settings: ServeConfig, unnamed: Pair, *, json_output: bool, worker: Worker | None = None) -> int:
    """Serve until drained or failed; returns the exit code.

    unnamed  the pair to serve if the settings name no model
    worker   the supervisor's worker, which reports that the model is ready; None: stdout gets the ready line
    Raises ConfigError before any client could connect.
    """
    if settings["model"] is not None:
        check_model(settings["model"])
    _check_free(settings.endpoint())
    if settings["http"] is not None:
        check_gateway(settings["http"], settings["http_origins"])
    if settings["cache_dir"] is not None:
        make_private(Path(settings["cache_dir"]), "cache_dir")
    loading = _Loading(settings, unnamed, worker)
    curve = None
    if settings["curve_keys"] is not None:
        from lowlat.serving.curve_keys import server_curve

        curve = server_curve(settings["curve_keys"])
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_descriptor_limit()
    server = Server(
        loading.make_engine,
        loading.codec,
        settings["endpoint"],
        settings.limits(),
        allow_uids=settings["allow_uid"],
        curve=curve,
        name=f"lowlat {lowlat.__version__}",
        keeper=worker,
    )
    with serving_log(settings["log_format"]), _drained_by_signals(server), ExitStack() as gateway:
        facts = {"event": "ready", "endpoint": server.endpoint, "pid": os.getpid(), **loading.facts}
        if settings["http"] is not None:
            facts["http"] = gateway.enter_context(
                http_gateway(
                    settings["http"],
                    server.endpoint,
                    settings["http_host"],
                    settings["curve_keys"],
                    origins=settings["http_origins"],
                    socket_mode=settings["http_socket_mode"],
                )
            )
        if worker is not None:
            worker.serve(server, {**facts, "sleep_bytes": loading.sleep_bytes})
        elif json_output:
            print_json(facts)
        else:
            click.echo(_how_to_reach(facts, settings["curve_keys"]))
        sys.stdout.flush()
        return server.run()


def _check_free(endpoint: Endpoint) -> None:
    """Refuse a tcp:// address that cannot be bound; the server itself would notice only after the load.

    A name that only libzmq knows, such as that of a network interface, is not checked. Raises ConfigError.
    """
    if endpoint.scheme != "tcp" or not endpoint.port.isdigit():
        return
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        socket.create_server((endpoint.host, int(endpoint.port)), family=family).close()
    except socket.gaierror:
        return
    except OSError as error:
        raise ConfigError(f"cannot listen on {str(endpoint)!r}: {os.strerror(error.errno or 0)}") from error


@contextmanager
def _drained_by_signals(server: Server) -> Iterator[None]:
    """Start the server, and then let signals drain it, as a reader of the ready line may end it at once.

    During the load, signals have their default effect.
    """
    server.start()
    before = {number: signal.signal(number, lambda *_: server.drain()) for number in ending_signals()}
    try:
        yield
    finally:
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Loading:
    """A load in the decode thread, and the facts that it makes known: for the ready line, and the server's codec."""

    def __init__(self, settings: ServeConfig, unnamed: Pair, worker: Worker | None) -> None:
        self._settings, self._worker = settings, worker
        self.sleep_bytes: dict[str, int] = {}  # bytes that leave each device in a sleep
        self._speculative = settings.speculation(unnamed.draft_model() if settings["model"] is None else None)
        if self._speculative is not None and self._speculative.strict and self._speculative.model is not None:
            check_model(self._speculative.model)
        self._unnamed = unnamed
        self._name = settings["name"] or (unnamed.name if settings["model"] is None else None)
        self.codec = ServingCodec()
        self.facts: dict[str, Any] = {}

    @rare_collections()
    def make_engine(self) -> "RuntimeEngine":
        """Load the model, in the thread that will decode."""
        from lowlat.cli.running import load_runtime
        from lowlat.models.advice import advice_line, sampling_defaults
        from lowlat.serving.engine import RuntimeEngine

        settings = self._settings
        runtime = load_runtime(
            settings["model"] or self._unnamed.target(),
            self._speculative,
            settings["max_context"],
            reserve=None if self._worker is None else self._worker.reserve,
            **settings.runtime_options(),
        )
        residence = runtime.executor.residence
        self.sleep_bytes = {} if residence is None else residence.bytes_by_device()
        self.codec.bind(runtime.codec)
        strict = settings["perf_mode"] == "strict"
        defaults = sampling_defaults(runtime.directory, settings["sampling_defaults"], strict=strict)
        if defaults:
            logger.info("%s", SAMPLING.format(advice_line(defaults)))
        engine = RuntimeEngine(runtime, self._name, defaults)
        self.facts = _facts(engine.info, runtime)
        return engine


def _facts(info: EngineInfo, runtime: "Runtime") -> dict[str, Any]:
    return {
        "model": info.model,
        "directory": str(runtime.directory),
        "device": str(runtime.device_choice.device),
        "executor": runtime.executor.name,
        "max_batch": info.max_running,
        "max_context": info.max_context,
        "kv_cache_tokens": runtime.geometry.num_kv_tokens,
        "kv_cache_bytes": runtime.memory[0].need.kv_bytes,
        "numerics": info.numerics,
        "num_speculative_tokens": info.num_speculative_tokens,
        "speculation_error": runtime.speculation_error,
        "has_tokenizer": bool(info.tokenizer),
        "has_chat_template": info.has_chat_template,
        "sampling_defaults": dict(info.sampling_defaults),
    }


def _how_to_reach(facts: dict[str, Any], curve_keys: Path | None) -> str:
    """Return lines to copy that use the server: one for Python, one for the shell."""
    endpoint = facts["endpoint"]
    own = "" if endpoint == default_endpoint() else endpoint
    python = json.dumps(own) if own else ""
    shell = f" {shlex.quote(own)}" if own else ""
    prompt = '"The President shall"' if facts["has_tokenizer"] else "[1, 2, 3]"
    asked = '--prompt "The President shall"' if facts["has_tokenizer"] else "--token-ids 1,2,3"
    text = "c.text" if facts["has_tokenizer"] else "c.token_ids"
    depth = facts["num_speculative_tokens"]
    speculation = f"{depth} draft tokens a step" if depth else "no speculation"
    lines = [
        f"{facts['model']} on {facts['device']}: {facts['max_batch']} requests at once, "
        f"{facts['max_context']} tokens each, {speculation}",
        f"  endpoint  {endpoint}",
    ]
    if curve_keys is None:
        lines.append(
            f'  python    from lowlat.ipc import Client; [print({text}, end="", flush=True) '
            f"for c in Client({python}).generate({prompt})]"
        )
        keys = ""
    else:
        keys = " --curve-keys DIR"
    lines.append(f"  shell     lowlat generate --endpoint{shell}{keys} {asked}")
    if facts["has_tokenizer"]:
        lines.append(f"            lowlat chat{' --endpoint' + shell if own else ''}{keys}")
    size = format_bytes(facts["kv_cache_bytes"])
    lines.append(f"  KV cache  {facts['kv_cache_tokens']:,} tokens in {size} (--kv-cache-gib)")
    if facts["sampling_defaults"]:
        advice = ", ".join(f"{name} {value:g}" for name, value in facts["sampling_defaults"].items())
        lines.append(f"  sampling  {advice}, as the model's authors advise (--sampling-defaults)")
    if "http" in facts:
        lines.append(f"  http      {facts['http']['page']}")
    lines.append("Ctrl-C ends it.")
    return "\n".join(lines)
