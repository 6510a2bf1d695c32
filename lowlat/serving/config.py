"""What `lowlat serve` is told: options before the environment before a TOML file before defaults, every name known.

A setting has one name everywhere: `max_queue` is --max-queue, LOWLAT_MAX_QUEUE, and `max_queue = 256` in the file.
Checked without torch: whether a directory or a device is any good is the loader's to say.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lowlat.checkpoint.files import read_text
from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import Endpoint, default_endpoint, parse_endpoint
from lowlat.ipc.limits import Limits
from lowlat.options.config import RuntimeConfig, SpeculativeConfig

__all__ = ["SETTINGS", "ServeConfig", "Setting", "unknown_variables"]

PREFIX = "LOWLAT_"
MAX_FILE_BYTES = 1 << 20
OTHERS_VARIABLES = {"LOWLAT_KERNEL_CACHE"}  # of this package, but not the server's
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One setting.

    kind     "int", "float", "bool", "str", "path" or "ints": a list of integers, with commas between them in text
    default  what holds where nobody says anything; None: found at load
    group    "server", "model", "speculation", "runtime" or "limits"
    help     one phrase
    """

    name: str
    kind: str
    default: Any
    group: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """Its option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its variable in the environment."""
        return PREFIX + self.name.upper()


def _server() -> list[Setting]:
    return [
        Setting("endpoint", "str", None, "server", "Where to listen: ipc://PATH or tcp://ADDRESS:PORT."),
        Setting("allow_uid", "ints", (), "server", "User ids that may connect beside the server's own."),
        Setting("curve_keys", "path", None, "server", "Folder of CURVE keys, for tcp:// (see --make-curve-keys)."),
        Setting("log_format", "str", "text", "server", "How the log on stderr is written.", ("text", "json")),
    ]


def _model() -> list[Setting]:
    head = SpeculativeConfig
    return [
        Setting("model", "path", None, "model", "A Hugging Face directory; the bundled model by default."),
        Setting("name", "str", None, "model", "What clients are told the model is called."),
        Setting("head", "path", None, "speculation", "An EAGLE3 head for the model; the bundled model has its own."),
        Setting("num_speculative_tokens", "int", None, "speculation", "Depth of speculation; 0: none."),
        Setting("tree", "path", None, "speculation", "A table of choices: YAML, TOML or JSON."),
        Setting("max_path_len", "int", None, "speculation", "Nodes of a tree's longest path, at most."),
        Setting("max_decoding_tokens", "int", None, "speculation", "Nodes of a tree, at most."),
        Setting("max_non_leaves_per_layer", "int", None, "speculation", "A tree's nodes with children at one depth."),
        Setting("capture_layers", "ints", None, "speculation", "Boundaries that the head reads."),
        Setting("draft_window", "int", None, "speculation", "The head attends to the first 4 and last N rows only."),
        Setting("strict", "bool", head.strict, "speculation", "A head that does not fit is an error."),
        Setting("simulated_accept_length", "float", None, "speculation", "Impose so many tokens a step."),
        Setting("simulated_seed", "int", head.simulated_seed, "speculation", "Seed of the imposed acceptance."),
    ]


def _runtime() -> list[Setting]:
    own = RuntimeConfig
    executors = ("auto", "reference", "eager", "graph")
    dtypes = ("auto", "bfloat16", "float32")
    return [
        Setting("max_batch", "int", own.max_batch, "runtime", "Requests that decode together."),
        Setting(
            "max_context", "int", None, "runtime", f"Tokens of prompt and text; {own.max_context}, or the model's."
        ),
        Setting("device", "str", own.device, "runtime", "auto, cpu, cuda or cuda:N."),
        Setting("dtype", "str", own.dtype, "runtime", "Compute dtype; auto is the checkpoint's.", dtypes),
        Setting("executor", "str", own.executor, "runtime", "How steps are run.", executors),
        Setting("block_size", "int", own.block_size, "runtime", "Positions of a KV block."),
        Setting("prefill_chunk", "int", own.prefill_chunk, "runtime", "Positions of a prefill chunk."),
        Setting("max_prefill_chunks", "int", own.max_prefill_chunks, "runtime", "Chunks of a prompt at once."),
        Setting("kv_blocks", "int", None, "runtime", "KV blocks in the pool; by default what max_batch needs."),
        Setting("prefix_reuse", "bool", own.prefix_reuse, "runtime", "Share the KV of equal prefixes."),
        Setting("share_decoded", "bool", own.share_decoded, "runtime", "Also what decoding wrote; bits may differ."),
        Setting("device_loop", "bool", own.device_loop, "runtime", "Let the GPU repeat steps by itself."),
    ]


_LIMITS_HELP = {
    "max_message_bytes": "Bytes of a client's frame.",
    "max_clients": "Connections at once.",
    "max_requests_per_client": "Requests of one connection, waiting and running.",
    "max_queue": "Requests that wait for a slot; beyond it `busy`.",
    "max_credit": "Tokens that a request may be granted at once.",
    "max_bad_messages": "Wrong messages before a peer is dropped.",
    "max_messages_per_s": "Messages of one client in a second; one that sends more is dropped.",
    "high_water_mark": "Messages queued to one peer by its socket.",
    "slow_consumer_s": "Seconds that tokens wait for credit before the stream ends.",
    "heartbeat_interval_s": "Seconds between heartbeats.",
    "heartbeat_timeout_s": "Seconds without a sign of life after which a peer is gone.",
    "drain_s": "Seconds that SIGTERM lets requests finish.",
    "watchdog_factor": "A step so many times older than its usual p99 hangs.",
    "watchdog_min_s": "But no step of fewer seconds does.",
    "linger_s": "Seconds that last messages may take to leave.",
    "spin_s": "Seconds awake after a request, where another came so soon before; 0 never.",
}


def _limits() -> list[Setting]:
    return [
        Setting(
            item.name,
            "float" if isinstance(item.default, float) else "int",
            item.default,
            "limits",
            _LIMITS_HELP.get(item.name, ""),
        )
        for item in fields(Limits)
    ]


SETTINGS: dict[str, Setting] = {setting.name: setting for setting in (*_server(), *_model(), *_runtime(), *_limits())}


@dataclass(frozen=True)
class ServeConfig:
    """Every setting's value, and where it came from: "option", "environment", a file's name or "default"."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    @classmethod
    def gather(
        cls, options: Mapping[str, Any], environment: Mapping[str, str], file: str | Path | None = None
    ) -> "ServeConfig":
        """Put options (None: not given), environment, file and defaults together.

        Raises ConfigError for an unknown or ill-typed setting, naming where it stands, and for one out of its range.
        """
        values = {name: setting.default for name, setting in SETTINGS.items()}
        values["endpoint"] = default_endpoint({**environment, "LOWLAT_ENDPOINT": ""})
        sources = dict.fromkeys(SETTINGS, "default")
        layers: list[tuple[str, Mapping[str, Any]]] = []
        if file is not None:
            layers.append((str(file), _read_file(Path(file))))
        layers.append(("environment", _read_environment(environment)))
        layers.append(("option", {name: value for name, value in options.items() if value is not None}))
        for source, layer in layers:
            for name, value in layer.items():
                place = {"environment": SETTINGS[name].variable, "option": SETTINGS[name].option}.get(source)
                values[name] = _checked(SETTINGS[name], value, place or f"{source}: {name}")
                sources[name] = source
        config = cls(values, sources)
        config.check()
        return config

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def endpoint(self) -> Endpoint:
        """Where to listen. Raises ConfigError for what cannot be an endpoint."""
        return parse_endpoint(self["endpoint"])

    def limits(self) -> Limits:
        """The server's limits. Raises ConfigError for one out of its range."""
        return Limits(**self._group("limits"))

    def runtime_options(self) -> dict[str, Any]:
        """Options of `Runtime.load` but max_context. Raises ConfigError for one out of its range."""
        options = self._group("runtime")
        options |= {name: self[name] for name in ("watchdog_factor", "watchdog_min_s")}  # of the server's watchdog, too
        context = options.pop("max_context")
        RuntimeConfig(**options, **({} if context is None else {"max_context": context}))
        return options

    def speculation(self, bundled_draft_model: Path) -> SpeculativeConfig | None:
        """How to speculate; None without a head. Raises ConfigError, also for settings that need a head."""
        names = [name for name, setting in SETTINGS.items() if setting.group == "speculation" and name != "head"]
        given = {name: self[name] for name in names if self.sources[name] != "default"}
        head = self["head"]
        if head is None and self["model"] is None:
            head = bundled_draft_model
        if head is None:
            if given:
                name = min(given)
                raise ConfigError(f"{name} ({self.sources[name]}) needs a head: without one there is no speculation")
            return None
        if "tree" in given and "num_speculative_tokens" not in given:
            from lowlat.speculators.tree.topology import TreeTopology

            given["num_speculative_tokens"] = TreeTopology.from_choices(given["tree"]).depth
        return SpeculativeConfig(model=head, **given)

    def check(self) -> None:
        """Refuse what can be refused without loading anything. Raises ConfigError."""
        self.endpoint()
        self.limits()
        self.runtime_options()
        self.speculation(Path("bundled"))

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in self.values.items()}

    def to_toml(self) -> str:
        """A file that says the same, each line with where its value came from; what is unset is a comment."""
        lines: list[str] = []
        group = ""
        for name, setting in SETTINGS.items():
            if setting.group != group:
                group = setting.group
                lines += ["", f"# {group}"] if lines else [f"# {group}"]
            value = self[name]
            text = f"# {name} =" if value is None else f"{name} = {_toml(value)}"
            lines.append(f"{text:<40} # {self.sources[name]}; {setting.help}")
        return "\n".join(lines)

    def _group(self, group: str) -> dict[str, Any]:
        return {name: self[name] for name, setting in SETTINGS.items() if setting.group == group}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that begin like ours and are none: likely a slip of the pen."""
    known = {setting.variable for setting in SETTINGS.values()} | OTHERS_VARIABLES
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings in the environment; an empty variable says nothing."""
    found = {}
    for name, setting in SETTINGS.items():
        text = environment.get(setting.variable, "")
        if text:
            found[name] = _from_text(setting, text)
    return found


def _from_text(setting: Setting, text: str) -> Any:
    try:
        if setting.kind == "int":
            return int(text)
        if setting.kind == "float":
            return float(text)
        if setting.kind == "ints":
            return tuple(int(part) for part in text.replace(",", " ").split())
        if setting.kind == "bool":
            return _TRUTHS[text.lower()]
    except (ValueError, KeyError):
        raise ConfigError(f"{setting.variable} must be {_KINDS[setting.kind]}, got {text!r:.80}") from None
    return text


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(read_text(path, MAX_FILE_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no TOML: {error!s:.200}") from error
    _refuse_unknown(values, str(path))
    for name in ("model", "head", "tree", "curve_keys"):  # beside the file, wherever the server is started
        if isinstance(values.get(name), str) and values[name]:
            values[name] = str(path.parent / values[name])
    return values


def _refuse_unknown(names: Iterable[str], place: str) -> None:
    for name in names:
        if name not in SETTINGS:
            raise ConfigError(f"{place}: unknown setting {name!r:.80}; known are {', '.join(SETTINGS)}")


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "path": "a path",
    "ints": "a list of integers",
}


def _checked(setting: Setting, value: Any, place: str) -> Any:
    """The value in its own type. Raises ConfigError saying where it stands and what it must be."""
    kind = setting.kind
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str) and value:
        if setting.choices and value not in setting.choices:
            raise ConfigError(f"{place} must be one of {', '.join(setting.choices)}, got {value!r:.80}")
        return value
    if kind == "path" and isinstance(value, (str, Path)) and str(value):
        return Path(value).expanduser()
    whole = isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    if kind == "ints" and whole:
        return tuple(value)
    raise ConfigError(f"{place} must be {_KINDS[kind]}, got {value!r:.80}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, (str, Path)):
        text = str(value)
        escaped = "".join("\\" + c if c in '"\\' else c if c.isprintable() else f"\\U{ord(c):08X}" for c in text)
        return f'"{escaped}"'
    return repr(value)
