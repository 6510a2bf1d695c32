"""This module reads `[[models]]` of the server's file, and checks each model's settings before anything is started."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import parse_endpoint
from lowlat.options.model_names import display_name
from lowlat.serving.config import MODELS_TABLE, ServeConfig, read_toml

__all__ = ["ModelTable", "has_tables", "read_tables"]

OWN = ("model", "head", "name")  # settings that only a table may have
SUPERVISORS = (  # settings that no model's process has
    "http", "http_host", "http_origins", "http_socket_mode", "models_gib", "busy_s",
)  # fmt: skip
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ModelTable:
    """One model: its name in requests, the endpoint of its server, and its settings."""

    name: str
    endpoint: str
    settings: ServeConfig

    def given(self) -> dict[str, Any]:
        """Return the settings that are not defaults, as JSON values, for its process."""
        given = {key: value for key, value in self.settings.to_dict().items() if self._is_given(key)}
        return {"can_sleep": True, **given, "name": self.name, "endpoint": self.endpoint}

    def _is_given(self, key: str) -> bool:
        return self.settings.sources[key] != "default" and key not in SUPERVISORS


def has_tables(file: str | Path | None) -> bool:
    """Return whether a file has [[models]]. Raises ConfigError for a file that cannot be read."""
    return file is not None and MODELS_TABLE in read_toml(Path(file))


def read_tables(
    options: Mapping[str, Any], environment: Mapping[str, str], file: str | Path
) -> tuple[ServeConfig, list[ModelTable]]:
    """The server's own settings, and those of each model in the file's order; the first one listens at the endpoint.

    Raises ConfigError for settings that cannot be, naming where they stand.
    """
    shared = ServeConfig.gather(options, environment, file)
    for key in OWN:
        if shared.sources[key] != "default":
            raise ConfigError(f"{key} ({shared.sources[key]}) is each model's own where there are [[models]]")
    if shared["curve_keys"] is not None:
        raise ConfigError("curve_keys is not implemented for [[models]], which listen at ipc://; leave it out")
    base = parse_endpoint(shared["endpoint"]).path
    if base is None:
        raise ConfigError(f"[[models]] listen at ipc://, and endpoint is {shared['endpoint']!r:.200}")
    tables = read_toml(Path(file))[MODELS_TABLE]
    found: list[ModelTable] = []
    for number in range(len(tables)):
        settings = ServeConfig.gather(options, environment, file, table=number)
        place = f"{file}: {MODELS_TABLE}[{number}]"
        if settings["model"] is None:
            raise ConfigError(f"{place} names no model")
        if settings["kv_cache_gib"] == "free":
            raise ConfigError(
                f"{place}: kv_cache_gib 'free' ({settings.sources['kv_cache_gib']}) is for a model that has its GPUs "
                "to itself, and [[models]] share them; give each a number of GiB (models_gib bounds them together)"
            )
        name = settings["name"] or display_name(settings["model"])
        own = f"ipc://{base.with_name(_UNSAFE.sub('_', name) + '.sock')}"
        endpoint = shared["endpoint"] if not number else own
        parse_endpoint(endpoint)
        for other in found:
            if name == other.name or endpoint == other.endpoint:
                raise ConfigError(f"{place}: two models are called {name!r:.80}; give each a name of its own")
        found.append(ModelTable(name, endpoint, settings))
    return shared, found
