"""This module has the options that commands share: it makes flags of declared options, and records of their values.

The records have the defaults; an option that was not given is not passed on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from lowlat.cli.console import want_json
from lowlat.cli.help import DeclaredOption
from lowlat.cli.paths import FILE, FOLDER, MODEL, check_model
from lowlat.errors import ConfigError, meant
from lowlat.options.declaration import Option, options_of
from lowlat.options.request import ADVISED_OPTIONS, SamplingParams
from lowlat.options.runtime import RuntimeConfig, TraceConfig
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

__all__ = [
    "CURVE_HELP",
    "DIRECTORY",
    "STORED",
    "IntegerList",
    "as_json",
    "asked_sampling",
    "bundled",
    "declared_options",
    "defaults_option",
    "depth_option",
    "draft_model_option",
    "given_options",
    "has_bundled",
    "json_file_option",
    "json_flag",
    "parse_biases",
    "record_options",
    "runtime_options",
    "runtime_values",
    "sampling_options",
    "sampling_params",
    "sampling_values",
    "speculation_options",
    "speculative_config",
    "trace_config",
]

F = TypeVar("F", bound=Callable[..., Any])
DIRECTORY = click.Path(path_type=Path)  # checked by the command, or by its loader
PATHS = {"curve_keys": FOLDER, "tree": FILE, "draft_vocab": FILE}  # paths that must exist
SAMPLING, SPECULATION, RUNTIME = "sampling", "speculation", "runtime"  # sections of the help
RECORD_SECTIONS: dict[type, str] = {SamplingParams: SAMPLING, SpeculativeConfig: SPECULATION, RuntimeConfig: RUNTIME}
MAX_DIGITS = 20
MAX_OPTION_BYTES = 1 << 20
STORED = ("quantize", "quantize_lm_head", "kv_cache_dtype", "activations")  # options of a target's formats
NO_DEMO_MODELS = (
    "the demo models are not installed: `pip install lowlat-demo-models` (from a checkout: `pip install "
    "./lowlat/demo`), or name a model, as in `lowlat chat Qwen/Qwen3-0.6B`"
)
CURVE_HELP = "Folder of a client's keys, for tcp://; server.key and client.key_secret."


class IntegerList(click.ParamType[tuple[int | str, ...]]):
    """Integers with commas or blanks between them, such as "1,2,3"; words that stand for one may be among them."""

    name = "integers"

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = tuple(words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | str, ...]:
        """Return the integers; a value that is not a list of them is a usage error."""
        if isinstance(value, tuple):
            return value
        numbers: list[int | str] = []
        for part in str(value).replace(",", " ").split():
            if part in self._words:
                numbers.append(part)
                continue
            digits = part.removeprefix("-")
            if not (digits.isascii() and digits.isdecimal()) or len(digits) > MAX_DIGITS:
                self.fail(f"{part!r:.40} is not an integer", param, ctx)
            numbers.append(int(part))
        return tuple(numbers)


class TextOfFile(click.ParamType[str]):
    """The text of a file that is named; - is stdin."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text; a file that cannot be read, or is too long to be an option, is a usage error."""
        try:
            with click.open_file(str(value), "rb") as file:
                data: bytes = file.read(MAX_OPTION_BYTES + 1)
            if len(data) > MAX_OPTION_BYTES:
                self.fail(f"{value!s:.200} has more than {MAX_OPTION_BYTES} bytes", param, ctx)
            return data.decode("utf-8")
        except OSError as error:
            self.fail(f"{value!s:.200}: {error.strerror}", param, ctx)
        except UnicodeDecodeError as error:
            self.fail(f"{value!s:.200} is not UTF-8: byte {error.start}", param, ctx)


class NumberOrWord(click.ParamType[float | str]):
    """A number of an option's kind, or one of its words, which stand for one."""

    name = "number"

    def __init__(self, option: Option) -> None:
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Return the word or the number; anything else is a usage error."""
        if value in self._option.words:
            return str(value)
        try:
            return int(value) if self._option.kind == "int" else float(value)
        except ValueError:
            self.fail(f"must be {self._option.wanted}, got {value!r:.40}", param, ctx)


def bundled(part: str) -> Path:
    """Return the path of a demo model's directory (target, head: its draft model, chat_head), or of their prompts.

    A checkout has the models next to the prompts; an installed lowlat uses those of the wheel lowlat-demo-models.
    Raises ConfigError if neither exists.
    """
    path = _bundled(part)
    if path is None:
        raise ConfigError(NO_DEMO_MODELS)
    return path


def has_bundled(part: str) -> bool:
    """Whether a demo model's directory is there: see `bundled`."""
    return _bundled(part) is not None


def _bundled(part: str) -> Path | None:
    for package in ("lowlat.demo", "lowlat_demo_models"):
        spec = find_spec(package)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            if (path := Path(folder).resolve() / part).exists():
                return path
    return None


def declared_options(
    function: F, options: Iterable[Option], section: str = "", sections: Mapping[str, str] | None = None
) -> F:
    """Add declared options as flags, in their order; an option that is not given is None, or () if it is repeatable.

    Rare options share the flag --set; those that are not given are left out.

    section   the section of the help for options without one
    sections  sections by key, if the options are of several records
    """
    found = list(options)
    for option in reversed(found):
        place = option.group or (sections or {}).get(option.key, section)
        function = (_refused if option.rare else _flag)(option, place)(function)
    return _set_flag({option.key: option for option in found})(function) if any(o.rare for o in found) else function


def record_options(record: type, *keys: str, filled: bool = False) -> Callable[[F], F]:
    """Add some of a record's options as flags; where `filled`, one that is not given has its default."""
    found = {option.key: option for option in options_of(record)}

    def add(function: F) -> F:
        for key in reversed(keys):
            place = found[key].group or RECORD_SECTIONS.get(record, "")
            function = _flag(found[key], place, filled=filled)(function)
        return function

    return add


def depth_option(help: str) -> Callable[[F], F]:
    """Add -S for a command that cannot do without speculation."""
    least_one = click.IntRange(1, MAX_SPECULATIVE_TOKENS)
    default = SpeculativeConfig.num_speculative_tokens
    names = ("-S", "--num-speculative-tokens")
    return click.option(*names, type=least_one, default=default, show_default=True, metavar="N", help=help)


def _flag(option: Option, section: str, *, filled: bool = False) -> Callable[[F], F]:
    """The flag of one declared option."""
    spellings = [*option.flags, *("--" + name.replace("_", "-") for name in (*option.aliases, option.key))]
    shape: dict[str, Any] = {"cls": DeclaredOption, "declared": option, "section": section, "help": _said(option)}
    if option.kind == "bool":
        return click.option(f"{option.flag}/--no-{option.flag[2:]}", option.key, default=None, **shape)
    repeatable = _repeats(option)
    kind, metavar = _kind_of(option, repeatable)
    return click.option(
        *spellings,
        option.key,
        **shape,
        type=kind,
        metavar=option.metavar or metavar or None,
        multiple=repeatable,
        default=option.default if filled else None,
    )


def _repeats(option: Option) -> bool:
    return option.kind in ("texts", "biases") or "stop_token_id" in option.aliases


def _said(option: Option) -> str:
    """All that the help says of an option."""
    text = option.help + (" Repeatable." if _repeats(option) and not option.rare else "")
    default = option.otherwise or ("" if option.default in (None, (), False) else str(option.default))
    if default:
        text += f"  [default: {default.lower() if option.kind == 'bool' else default}]"
    return text


def _kind_of(option: Option, repeatable: bool = False) -> tuple[Any, str]:
    """The type of an option's value on the command line, and how the help names one."""
    kinds: dict[str, tuple[Any, str]] = {
        "int": (int, "N"),
        "bool": (click.BOOL, ""),
        "float": (float, "X"),
        "str": (str, "TEXT"),
        "choice": (click.Choice(option.choices), ""),
        "path": (PATHS.get(option.key, DIRECTORY), "PATH"),
        "ints": (int if repeatable else IntegerList(), "N,N"),
        "texts": (str, "TEXT"),
        "biases": (str, "ID=BIAS"),
    }
    kind, metavar = kinds[option.kind]
    if option.words:
        kind, metavar = NumberOrWord(option), "|".join((metavar, *option.words))
    return TextOfFile() if option.from_file else kind, metavar


def _refused(option: Option, section: str) -> Callable[[F], F]:
    """The flag that a rare option would have, which says how it is set."""

    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            raise click.UsageError(f"{option.flag} is a rare option: say --set {option.key}=VALUE")

    names = ["--" + name.replace("_", "-") for name in (*option.aliases, option.key)]
    if option.kind == "bool":
        names = [f"{option.flag}/--no-{option.flag[2:]}"]
    _, metavar = _kind_of(option)
    value = option.metavar or metavar or (option.kind == "bool" and "yes|no") or "|".join(option.choices)
    shape: dict[str, Any] = {"cls": DeclaredOption, "declared": option, "section": section, "value": value}
    shape |= {"hidden": True, "expose_value": False, "callback": refuse, "help": _said(option)}
    return click.option(*names, f"refused_{option.key}", default=None, **shape)


def _set_flag(known: Mapping[str, Option]) -> Callable[[F], F]:
    """The flag --set, by which rare options among these are given; they become parameters of the command."""
    names = {name: option for option in known.values() for name in (option.key, *option.aliases)}

    def assign(ctx: click.Context, param: click.Parameter, entries: Sequence[str]) -> None:
        for entry in entries:
            name, equals, text = entry.partition("=")
            option = names.get(name.strip().replace("-", "_"))
            declared = {
                each.declared.key: each.declared for each in ctx.command.params if isinstance(each, DeclaredOption)
            }
            option = option or declared.get(name.strip().replace("-", "_"))
            if option is None:
                how = {key: f"--set {key}=VALUE" if each.rare else each.flag for key, each in declared.items()}
                raise click.UsageError(f"--set: no option is called {name!r:.80}{meant(name, how, how)}")
            if not option.rare:
                raise click.UsageError(f"--set is for rare options, and {option.key} has a flag: {option.flag}")
            if not equals:
                raise click.UsageError(f"--set takes NAME=VALUE, got {entry!r:.80}")
            if ctx.params.get(option.key) is not None:
                raise click.UsageError(f"--set gives {option.key} twice")
            try:
                ctx.params[option.key] = click.types.convert_type(_kind_of(option)[0]).convert(text.strip(), param, ctx)
            except click.BadParameter as error:
                raise click.UsageError(f"--set {option.key}: {error.message}") from None

    text = "Set a rare option, of those that --help-all shows. Repeatable."
    shape: dict[str, Any] = {"multiple": True, "metavar": "NAME=VALUE", "expose_value": False, "callback": assign}
    return click.option("--set", "set_rare", **shape, help=text)


def given_options(values: Mapping[str, Any], record: type) -> dict[str, Any]:
    """The options of a record among the values that were given, by field."""
    found = {option.name: values.get(option.key) for option in options_of(record)}
    return {name: value for name, value in found.items() if value not in (None, ())}


def sampling_options(function: F) -> F:
    """Add every field of SamplingParams as an option; `sampling_params` builds the record."""
    options = (option for option in options_of(SamplingParams) if not option.python_only)
    return declared_options(function, options, SAMPLING)


def defaults_option(function: F) -> F:
    """Add --sampling-defaults, as the server has it; one that is not given is None."""
    from lowlat.serving.config import SETTINGS

    return declared_options(function, [SETTINGS["sampling_defaults"]], SAMPLING)


def asked_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling to send to a server: what was given, and lowlat's own defaults where these were asked for."""
    own: dict[str, Any] = {}
    if values.get("sampling_defaults") == "lowlat":
        own = {name: getattr(SamplingParams, name) for name in ADVISED_OPTIONS}
    return own | sampling_values(values)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Build SamplingParams from the options that were given. Raises RequestError."""
    return SamplingParams.from_options(sampling_values(values))


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams among the options that were given, in their own types."""
    given = given_options(values, SamplingParams)
    if "logit_bias" in given:
        given["logit_bias"] = parse_biases(given["logit_bias"])
    return given


def parse_biases(entries: Sequence[str]) -> dict[int, float]:
    """Token id to bias, from entries `ID=BIAS`; anything else is a usage error."""
    biases: dict[int, float] = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            number, value = int(token), float(bias)
        except ValueError:
            raise click.BadParameter(f"{entry!r:.40} is not ID=BIAS", param_hint="--logit-bias") from None
        if number in biases:
            raise click.BadParameter(f"token {number} is given twice", param_hint="--logit-bias")
        biases[number] = value
    return biases


def speculation_options(function: F) -> F:
    """Add the draft model and how to speculate with it; `speculative_config` builds the record."""
    options = (option for option in options_of(SpeculativeConfig) if not option.python_only)
    return declared_options(function, options, SPECULATION)


def draft_model_option(help: str, name: str = "head") -> Callable[[F], F]:
    """Add --draft-model, and its other name --head."""
    return click.option("--draft-model", "--head", name, type=MODEL, metavar="MODEL", help=help)


def speculative_config(
    values: Mapping[str, Any], default_draft_model: Path | None = None, *, needed: bool = False
) -> SpeculativeConfig | None:
    """Build SpeculativeConfig from the given options; None without a draft model, named or by default.

    Raises ConfigError for values out of range, and for an option that needs a draft model if there is none. With
    `needed` or --strict it also raises ConfigError for a draft model that does not exist.
    """
    from lowlat.serving.config import SETTINGS, speculative_config

    given = {name: value for name, value in values.items() if value is not None}
    config = speculative_config(given, default_draft_model, lambda name: SETTINGS[name].said)
    if config is not None and config.model is not None and (needed or config.strict):
        check_model(config.model)
    return config


def runtime_options(function: F) -> F:
    """Add devices, dtype, executor, context and rounding of a runtime; `given_options` has those that were given."""
    names = (
        *("max_context", "device", "tensor_parallel_size", "dtype", "executor"),
        *("quantize", "quantize_lm_head", "kv_cache_dtype", "activations"),
    )
    return record_options(RuntimeConfig, *names)(function)


def runtime_values(values: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """The options of RuntimeConfig that were given, next to a command's own, checked. Raises ConfigError."""
    given = {**own, **given_options(values, RuntimeConfig)}
    RuntimeConfig(**given)
    return given


def trace_config(names: str | None) -> TraceConfig:
    """The traces named with commas between them; an unknown one is a usage error."""
    known = list(TraceConfig.__dataclass_fields__)
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise click.BadParameter(f"{name!r:.40} is no trace; known: {', '.join(known)}", param_hint="--trace")
    return TraceConfig(**dict.fromkeys(wanted, True))


def json_flag(help: str) -> Callable[[F], F]:
    """Add the flag --json, under which an error is told on stdout, too."""
    return click.option("--json", "json_output", is_flag=True, is_eager=True, callback=want_json, help=help)


def as_json(function: F) -> F:
    """Add the flag --json."""
    return json_flag("Write one JSON object and nothing else.")(function)


def json_file_option(function: F) -> F:
    """Add --json, with or without the name of a file; `write_json` takes it."""
    help_text = "Write one JSON object, to stdout and nothing else there, or to FILE."
    shape: dict[str, Any] = {"is_flag": False, "flag_value": "-", "metavar": "[FILE]"}
    return click.option("--json", "json_file", **shape, is_eager=True, callback=want_json, help=help_text)(function)
