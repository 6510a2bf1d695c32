"""This module reads the settings of `lowlat serve` from options, else the environment, a TOML file, or defaults.

A setting has one name everywhere: `max_queue` is --max-queue, LOWLAT_MAX_QUEUE, and `max_queue = 256` in the file.
Checks need no torch; the loader later checks whether a directory or a device can be used.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lowlat.checkpoint.files import read_text
from lowlat.errors import ConfigError, meant
from lowlat.ipc.endpoint import Endpoint, default_endpoint, parse_endpoint
from lowlat.ipc.limits import Limits
from lowlat.options.declaration import Option, declare, options_of
from lowlat.options.method_options import AUTO_METHOD, NEEDS_MODEL
from lowlat.options.model_names import find_repository
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig

__all__ = [
    "GROUPS", "MODELS_TABLE", "SETTINGS", "ServeConfig", "read_toml", "speculative_config", "unknown_variables",
]  # fmt: skip

PREFIX = "LOWLAT_"
MAX_FILE_BYTES = 1 << 20
MODELS_TABLE = "models"  # tables of a file, each with the settings of one model
MODELS = ("model", "head")  # settings that may be names of repositories
_NAMED = re.compile(r"(\w+) must ")
# variables of this package that are no settings of the server
OTHERS_VARIABLES = {"LOWLAT_KERNEL_CACHE", "LOWLAT_API_KEY", "LOWLAT_SERVER_UID", "LOWLAT_TUNING"}
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class _Server:
    """Where to listen, and whom to serve."""

    endpoint: str | None = declare(None, "Where to listen: ipc://PATH or tcp://ADDRESS:PORT.")
    allow_uid: tuple[int, ...] = declare((), "User ids that may connect next to the server's own.")
    curve_keys: Path | None = declare(None, "Folder of CURVE keys, for tcp://; --make-curve-keys makes one.")
    http: str | None = declare(
        None, "Start an HTTP gateway as well; for OpenAI's clients and browsers.", metavar="[HOST:]PORT"
    )
    http_host: str | None = declare(
        None, "Further names under which the HTTP gateway is reached, with commas between.", metavar="NAMES"
    )
    http_origins: str | None = declare(
        None, "Origins of other sites whose pages may ask the HTTP gateway, with commas between; * is all.", rare=True
    )
    http_socket_mode: Literal["600", "660", "666"] = declare(
        "600",
        "Who may open the socket file of `http` unix:PATH: its owner (600), its group (660) or everybody who reaches "
        "its folder (666).",
        rare=True,
    )
    log_format: Literal["text", "json"] = declare("text", "How the log on stderr is written.")
    models_gib: float | None = declare(
        None,
        "Memory of a device that [[models]] of the file may hold together, GiB.",
        1e-6,
        1e6,
        otherwise="what is free when the first one loads",
        rare=True,
    )
    busy_s: float = declare(
        5.0,
        "Seconds after which one of [[models]] that has requests makes way for one that is asked for.",
        0.0,
        3600.0,
        rare=True,
    )


@dataclass(frozen=True)
class _Model:
    """The model served."""

    model: Path | None = declare(
        None, "A Hugging Face directory, or a repository's ORG/NAME; the bundled model by default.", metavar="MODEL"
    )
    name: str | None = declare(None, "What clients are told the model is called.")
    sampling_defaults: Literal["model", "lowlat"] = declare(
        "model",
        "What holds where a request leaves sampling open: the advice of the model's authors "
        "(generation_config.json), or lowlat's own defaults.",
    )


_RECORDS = {
    "server": _Server,
    "model": _Model,
    "speculation": SpeculativeConfig,
    "runtime": RuntimeConfig,
    "limits": Limits,
}
GROUPS = {
    group: [option for option in options_of(record) if not option.python_only] for group, record in _RECORDS.items()
}
SETTINGS: dict[str, Option] = {option.key: option for options in GROUPS.values() for option in options}
SERVERS = {option.key for option in GROUPS["server"]}
_KEYS = {name: option.key for option in SETTINGS.values() for name in (option.key, *option.aliases)}


def _variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


@dataclass(frozen=True)
class ServeConfig:
    """Every setting's value and its source: "option", "environment", a file's name or "default"."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    @classmethod
    def gather(
        cls,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        file: str | Path | None = None,
        *,
        table: int | None = None,
    ) -> "ServeConfig":
        """Combine options (None: not given), environment, file and defaults.

        table  number of the [[models]] table whose settings override the file's own; None: use no table
        Raises ConfigError for a setting that is unknown, of a wrong type or out of its range; it names the source.
        """
        values = {name: setting.default for name, setting in SETTINGS.items()}
        values["endpoint"] = default_endpoint({**environment, "LOWLAT_ENDPOINT": ""})
        sources = dict.fromkeys(SETTINGS, "default")
        layers: list[tuple[str, Mapping[str, Any], Callable[[str], str]]] = []
        if file is not None:
            layers.append((str(file), _read_file(Path(file), table), lambda name: f"{file}: {name}"))
        layers.append(("environment", _read_environment(environment), _variable))
        given = {name: value for name, value in options.items() if value is not None}
        layers.append(("option", given, lambda name: SETTINGS[_KEYS[name]].said))
        for source, layer, place in layers:
            for name, value in layer.items():
                key = _KEYS[name]
                if key != name and key in layer:
                    raise ConfigError(f"{place(name)} and {place(key)} are the same setting; give one of them")
                values[key] = _checked(SETTINGS[key], value, place(name))
                sources[key] = source
        config = cls(values, sources)
        config.check()
        return config

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def endpoint(self) -> Endpoint:
        """Return the endpoint to listen at. Raises ConfigError for an invalid one."""
        return parse_endpoint(self["endpoint"])

    def limits(self) -> Limits:
        """Return the server's limits. Raises ConfigError for one out of its range."""
        return Limits(**self._group("limits"))

    def runtime_options(self) -> dict[str, Any]:
        """Return the options of `Runtime.load` except max_context. Raises ConfigError for one out of its range."""
        options = self._group("runtime")
        options |= {name: self[name] for name in ("watchdog_factor", "watchdog_min_s")}  # shared with the server's
        context = options.pop("max_context")
        RuntimeConfig(**options, **({} if context is None else {"max_context": context}))
        return options

    def speculation(self, bundled_draft_model: Path | None) -> SpeculativeConfig | None:
        """Return the SpeculativeConfig; None without a draft model. Raises ConfigError, also for settings that need
        one."""
        given = {
            option.key: self[option.key] for option in GROUPS["speculation"] if self.sources[option.key] != "default"
        }
        default = bundled_draft_model if self["model"] is None else None
        return speculative_config(given, default, lambda name: f"{name} ({self.sources[name]})")

    def check(self) -> None:
        """Check what can be checked without loading. Raises ConfigError that names the source of the setting."""
        try:
            self.endpoint()
            self.limits()
            self.runtime_options()
            self.speculation(Path("bundled"))
        except ConfigError as error:
            named = _NAMED.match(str(error))
            key = next((key for key, option in SETTINGS.items() if named and named[1] in (key, option.name)), None)
            source = "default" if key is None else self.sources[key]
            if key is None or source in ("default", "option"):
                raise
            raise ConfigError(f"{_variable(key) if source == 'environment' else source}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self.values.items()}

    def to_toml(self) -> str:
        """Return a TOML file with these settings, each with its source; settings without a value are comments."""
        import tomli_w

        lines: list[str] = []
        for group, options in GROUPS.items():
            lines += ["", f"# {group}"] if lines else [f"# {group}"]
            for name in (option.key for option in options):
                value = self[name]
                shown = str(value) if isinstance(value, Path) else value
                text = f"# {name} =" if value is None else tomli_w.dumps({name: shown}).rstrip()
                lines.append(f"{text:<40} # {self.sources[name]}; {SETTINGS[name].help}")
        return "\n".join(lines)

    def _group(self, group: str) -> dict[str, Any]:
        return {option.name: self[option.key] for option in GROUPS[group]}


def speculative_config(
    given: Mapping[str, Any], default_draft_model: Path | None, named: Callable[[str], str]
) -> SpeculativeConfig | None:
    """Make a SpeculativeConfig of the given settings; None (plain decoding) if the method needs a draft model and there
    is none.

    given   settings by key; num_speculative_tokens of 0 needs no draft model
    named   returns a setting's name for a message
    Raises ConfigError for values out of range, and for settings that need a draft model.
    """
    values = {option.name: given[option.key] for option in GROUPS["speculation"] if option.key in given}
    method = given.get("method", SpeculativeConfig.method)
    needs_model = method in NEEDS_MODEL
    if needs_model or method == AUTO_METHOD:
        values.setdefault("model", default_draft_model)
    if needs_model and values["model"] is None:
        if values.get("num_speculative_tokens") == 0:
            del values["num_speculative_tokens"]
        needing = [option.key for option in GROUPS["speculation"] if values.get(option.name) is not None]
        if needing:
            raise ConfigError(
                f"{named(min(needing))} needs a draft model ({SETTINGS['head'].flag} DIR): "
                "without one there is no speculation"
            )
        return None
    if "tree" in values and "num_speculative_tokens" not in values:
        from lowlat.speculators.tree.topology import TreeTopology

        values["num_speculative_tokens"] = TreeTopology.from_choices(values["tree"]).depth
    if values.get("max_draft_len") is not None:
        values.setdefault("num_speculative_tokens", values["max_draft_len"])
    return SpeculativeConfig(**values)


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with lowlat's prefix that name no setting, and for each a text that suggests the meant name."""
    known = {name.removeprefix(PREFIX): name for name in {_variable(key) for key in _KEYS} | OTHERS_VARIABLES}
    names = sorted(name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX))
    return {PREFIX + name: meant(name, known, known) for name in names if name not in known}


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the settings in the environment; empty variables are ignored."""
    texts = {name: environment.get(_variable(name), "") for name in _KEYS}
    return {name: _from_text(SETTINGS[_KEYS[name]], text, _variable(name)) for name, text in texts.items() if text}


def _from_text(option: Option, text: str, place: str) -> Any:
    if text in option.words:
        return text
    readers: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "ints": lambda text: tuple(int(part) for part in text.replace(",", " ").split()),
        "bool": lambda text: _TRUTHS[text.lower()],
    }
    try:
        return readers.get(option.kind, str)(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{place} must be {option.wanted}, got {text!r:.80}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of settings, and check that [[models]] are tables. Raises ConfigError if it is not TOML."""
    try:
        values = tomllib.loads(read_text(path, MAX_FILE_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no TOML: {error!s:.200}") from error
    tables = values.get(MODELS_TABLE, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: {MODELS_TABLE} must be tables of settings: [[{MODELS_TABLE}]] before each")
    if MODELS_TABLE in values and not tables:
        raise ConfigError(f"{path}: {MODELS_TABLE} names no model")
    return values


def _read_file(path: Path, table: int | None) -> dict[str, Any]:
    values = read_toml(path)
    tables = values.pop(MODELS_TABLE, [])
    if table is not None:
        for name in tables[table]:
            key = _KEYS.get(name)
            if key in SERVERS:
                raise ConfigError(f"{path}: {name} is the server's, no model's: write it before [[{MODELS_TABLE}]]")
            values = {own: value for own, value in values.items() if key is None or _KEYS.get(own) != key}
        values |= tables[table]
    for name, value in values.items():
        if name not in _KEYS:
            if isinstance(value, dict):
                raise ConfigError(f"{path}: [{name:.80}] is a table; settings stand without one: name = value")
            raise ConfigError(
                f"{path}: unknown setting {name!r:.80}{meant(name, _KEYS)}; `lowlat serve --show-config` lists all"
            )
    for name, value in values.items():  # relative paths begin at the file's folder, not at the working directory
        if SETTINGS[_KEYS[name]].kind == "path" and isinstance(value, str) and value:
            beside = path.parent / value
            by_name = _KEYS[name] in MODELS and not beside.exists() and find_repository(value) is not None
            values[name] = value if by_name else str(beside)
    return values


def _checked(option: Option, value: Any, place: str) -> Any:
    """Convert a value to the setting's type. Raises ConfigError that names its place and the wanted type."""
    if option.kind == "choice" and not option.offers(value):
        choices = option.choices if isinstance(value, str) else map(repr, option.choices)  # 660 is no '660'
        raise ConfigError(f"{place} must be one of {', '.join(choices)}, got {value!r:.80}")
    if not option.takes(value):
        quoted = f"; in quotes: '{value}'" if option.kind == "str" and type(value) is int else ""
        raise ConfigError(f"{place} must be {option.wanted}, got {value!r:.80}{quoted}")
    if option.kind == "path":
        return Path(value).expanduser()
    if isinstance(value, str) and value in option.words:
        return value
    return {"float": float, "ints": tuple}.get(option.kind, lambda same: same)(value)
