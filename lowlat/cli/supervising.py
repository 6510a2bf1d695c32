"""This module runs a server of several models for `lowlat serve`: a supervisor, one gateway, a process a model."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import click

from lowlat.cli.console import print_json
from lowlat.errors import ConfigError, LowlatError
from lowlat.serving.config import ServeConfig
from lowlat.serving.gateway import check_gateway, http_gateway
from lowlat.serving.logs import serving_log
from lowlat.serving.models.supervisor import Supervisor
from lowlat.serving.models.tables import ModelTable
from lowlat.serving.models.worker import Worker

__all__ = ["serve_models", "serve_supervised"]


def serve_models(settings: ServeConfig, tables: Sequence[ModelTable], *, json_output: bool) -> int:
    """Serve several models until a signal ends the server; returns the exit code.

    settings  the server's own settings
    Raises ConfigError if no model could be served.
    """
    from lowlat.cli.paths import check_model

    for table in tables:
        check_model(table.settings["model"])
    if settings["http"] is not None:
        check_gateway(settings["http"], settings["http_origins"])
    supervisor = Supervisor(
        tables,
        settings["endpoint"],
        models_gib=settings["models_gib"],
        busy_s=settings["busy_s"],
        drain_s=settings.limits().drain_s,
    )
    with serving_log(settings["log_format"]), supervisor.running(), ExitStack() as gateway:
        facts: dict[str, Any] = {"event": "ready", "pid": os.getpid(), "endpoint": settings["endpoint"]}
        if settings["http"] is not None:
            facts["http"] = gateway.enter_context(
                http_gateway(
                    settings["http"],
                    settings["endpoint"],
                    settings["http_host"],
                    None,
                    origins=settings["http_origins"],
                    socket_mode=settings["http_socket_mode"],
                    roster=supervisor.roster,
                )
            )
        supervisor.run(until=lambda: supervisor.is_ready)
        if supervisor.is_ready:
            known = supervisor.facts()
            facts["models"] = [
                {"model": model.name, "endpoint": model.endpoint, "state": model.state, "problem": model.problem}
                for model in supervisor.listed
            ]
            if json_output:
                print_json(facts)
            else:
                click.echo(_how_to_reach(facts, known))
            sys.stdout.flush()
            supervisor.run()
    return 0


def serve_supervised(descriptor: int) -> int:
    """Serve one model, as the process of a supervisor at the other end of a socket; returns the exit code."""
    from lowlat.cli.serving import BUNDLED, serve

    worker = Worker(descriptor)
    try:
        return serve(worker.settings(), BUNDLED, json_output=True, worker=worker)
    except LowlatError as error:
        worker.failed(str(error), for_good=isinstance(error, ConfigError))
        raise


def _how_to_reach(facts: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> str:
    """Lines of each model, and how to ask."""
    lines = []
    for model in facts["models"]:
        own = known.get(model["model"])
        where = f" on {own['device']}" if own is not None else ""
        why = f": {model['problem']}" if model["problem"] else ""
        lines += [f"{model['model']}{where}, {model['state']}{why}", f"  endpoint  {model['endpoint']}"]
    if "http" in facts:
        lines.append(f"http        {facts['http']['page']}")
    lines.append("`lowlat top` shows who is awake. Ctrl-C ends all of them.")
    return "\n".join(lines)
