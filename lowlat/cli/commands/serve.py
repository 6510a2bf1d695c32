"""`lowlat serve`: a model is served at an endpoint until somebody ends it; options, environment or a file set it."""

import logging
import os
from pathlib import Path
from typing import Any

import click

from lowlat.cli.console import print_json
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import DIRECTORY, F, declared_options, json_flag
from lowlat.cli.paths import FILE, NEW_FOLDER
from lowlat.serving.config import GROUPS, SETTINGS, ServeConfig, unknown_variables

__all__ = ["command"]

logger = logging.getLogger("lowlat.serving")
SECTIONS = {option.key: group for group, options in GROUPS.items() for option in options}


def _settings(function: F) -> F:
    return declared_options(function, SETTINGS.values(), sections=SECTIONS)


@click.command("serve", cls=SectionedCommand)
@click.argument("served", metavar="[MODEL]", type=DIRECTORY, required=False)
@click.option("--config", type=FILE, metavar="FILE", help="Settings from a TOML file: name = value.")
@click.option("--show-config", is_flag=True, help="Print every setting, as such a file, and end.")
@click.option("--make-curve-keys", type=NEW_FOLDER, metavar="DIR", help="Write keys for tcp:// to a folder, and end.")
@click.option("--demo", is_flag=True, help="Serve a small chat model, fetched once (93 MB).")
@click.option("--supervised", type=int, hidden=True, help="A socket whose other end is a supervisor's.")
@json_flag("Say that the server is ready as one JSON object.")
@_settings
def command(
    served: Path | None,
    config: Path | None,
    show_config: bool,
    make_curve_keys: Path | None,
    demo: bool,
    supervised: int | None,
    json_output: bool,
    **options: Any,
) -> None:
    """Serve MODEL, a Hugging Face directory or ORG/NAME, to other processes here; without one, the bundled pair.

    A setting is an option (a rare one: --set name=value), else LOWLAT_NAME in the environment, else `name = value` in a
    TOML file. SIGTERM, SIGHUP or Ctrl-C waits for requests, for --drain-s at most; twice, it ends at once.
    """
    if make_curve_keys is not None:
        _make_keys(make_curve_keys, json_output)
        return
    if supervised is not None:
        from lowlat.cli.supervising import serve_supervised

        _end_with(serve_supervised(supervised))
        return
    if served is not None:
        if options["model"] is not None:
            raise click.UsageError(f"give the model once: {served} and --model {options['model']} are given")
        options["model"] = served
    settings = ServeConfig.gather(options, os.environ, config)
    if demo and settings["model"] is not None:
        raise click.UsageError(f"give --demo or a model, not both; {settings['model']} is one")
    for name, near in unknown_variables(os.environ).items():
        logger.warning("%s in the environment is no setting%s; `lowlat serve --show-config` lists them", name, near)
    if show_config:
        if json_output:
            print_json({"settings": settings.to_dict(), "sources": dict(settings.sources)})
        else:
            click.echo(settings.to_toml())
        return

    from lowlat.serving.models.tables import has_tables, read_tables

    if config is not None and has_tables(config):
        from lowlat.cli.supervising import serve_models

        if demo:
            raise click.UsageError(f"give --demo or [[models]], not both; {config} has some")
        _end_with(serve_models(*read_tables(options, os.environ, config), json_output=json_output))
        return

    from lowlat.cli.serving import BUNDLED, CHAT, serve

    _end_with(serve(settings, CHAT if demo else BUNDLED, json_output=json_output))


def _end_with(code: int) -> None:
    if code:
        raise click.exceptions.Exit(code)


def _make_keys(directory: Path, json_output: bool) -> None:
    from lowlat.serving.curve_keys import make_curve_keys

    files = make_curve_keys(directory)
    if json_output:
        print_json({"files": [str(file) for file in files]})
        return
    click.echo("\n".join(str(file) for file in files))
    click.echo(
        f"Serve with `--endpoint tcp://ADDRESS:PORT --curve-keys {directory}`. A client needs a folder of its own with "
        "server.key and client.key_secret; for more clients put their public keys into clients/.",
        err=True,
    )
