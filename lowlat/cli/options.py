"""Options that commands share: of sampling, speculation and the runtime; and how they become lowlat's own records.

Defaults are the records' own: an option that was not given is not passed on.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from lowlat.options.config import (
    MAX_SPECULATIVE_TOKENS,
    METHOD_OPTIONS,
    RuntimeConfig,
    SpeculativeConfig,
    TraceConfig,
)
from lowlat.options.request import MAX_LOGPROBS, SamplingParams

__all__ = [
    "CURVE_HELP",
    "DIRECTORY",
    "IntegerList",
    "as_json",
    "bundled",
    "parse_biases",
    "runtime_options",
    "sampling_options",
    "sampling_params",
    "sampling_values",
    "speculation_options",
    "speculative_config",
    "trace_config",
]

F = TypeVar("F", bound=Callable[..., Any])
DIRECTORY = click.Path(path_type=Path)  # a missing one is the loader's to refuse, with its own message
MAX_DIGITS = 20
CURVE_HELP = "Folder with server.key and client.key_secret, for tcp://."


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Integers with commas or blanks between them, such as "1,2,3"."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the integers; a value that is not a list of them is a usage error."""
        if isinstance(value, tuple):
            return value
        numbers = []
        for part in str(value).replace(",", " ").split():
            digits = part.removeprefix("-")
            if not (digits.isascii() and digits.isdecimal()) or len(digits) > MAX_DIGITS:
                self.fail(f"{part!r:.40} is not an integer", param, ctx)
            numbers.append(int(part))
        return tuple(numbers)


def bundled(part: str) -> Path:
    """The path of a bundled directory or file: target, head, chat_head, prompts.json, chat_prompts.json."""
    return Path(__file__).resolve().parent.parent / "demo" / part


def _apply(options: Sequence[Callable[[F], F]], function: F) -> F:
    """Decorate with options so that the help keeps their order."""
    return reduce(lambda inner, option: option(inner), reversed(options), function)


def _integer(name: str, text: str, *extra: str) -> Callable[[F], F]:
    return click.option(*extra, name, type=int, metavar="N", help=text)


def _number(name: str, text: str) -> Callable[[F], F]:
    return click.option(name, type=float, metavar="X", help=text)


def sampling_options(function: F) -> F:
    """Add every field of SamplingParams as an option; `sampling_params` builds the record."""
    own = SamplingParams
    options: list[Callable[[F], F]] = [
        _integer("--max-tokens", f"Tokens to generate at most.  [default: {own.max_tokens}]"),
        _integer("--min-tokens", "Before so many tokens no stop token can be chosen."),
        _number("--temperature", f"0 is greedy.  [default: {own.temperature}]"),
        _integer("--top-k", "Keep the N likeliest tokens; 0 keeps all."),
        _number("--top-p", "Keep the smallest set of this probability."),
        _number("--min-p", "Keep tokens at least so likely, relative to the likeliest."),
        _number("--repetition-penalty", "Divides the logits of tokens seen."),
        _number("--presence-penalty", "Subtracted once from tokens generated."),
        _number("--frequency-penalty", "Subtracted for every time a token was generated."),
        click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Add to a token's logit; repeatable."),
        _integer("--seed", "Keys the random numbers.  [default: a fresh one]"),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
        click.option(
            "--stop-token-id", "stop_token_ids", multiple=True, type=int, metavar="ID", help="End with it; repeatable."
        ),
        click.option("--ignore-eos", is_flag=True, default=None, help="The model's own end tokens do not end it."),
        _integer("--logprobs", f"With every token its N likeliest alternatives, 0 to {MAX_LOGPROBS}; needs --json."),
        _integer("--max-draft-tokens", "Draft tokens verified in one step, at most; 0: no speculation."),
    ]
    return _apply(options, function)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Build SamplingParams from the options that were given. Raises RequestError."""
    return SamplingParams.from_options(sampling_values(values))


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams among the options that were given, in their own types."""
    given = {name: values[name] for name in SamplingParams.__dataclass_fields__ if values.get(name) not in (None, ())}
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
    """Add the head and how to speculate with it; `speculative_config` builds the record."""
    depth = (
        f"Depth of speculation, 0 to {MAX_SPECULATIVE_TOKENS}.  "
        f"[default: {SpeculativeConfig.num_speculative_tokens}, or the tree's depth]"
    )
    options: list[Callable[[F], F]] = [
        click.option(
            "--method",
            type=click.Choice(list(METHOD_OPTIONS)),
            help=f"How to draft; ngram needs no head.  [default: {SpeculativeConfig.method}]",
        ),
        click.option("--head", type=DIRECTORY, metavar="DIR", help="An EAGLE3 head for the model."),
        _integer("--num-speculative-tokens", depth, "-S"),
        click.option("--tree", type=DIRECTORY, metavar="FILE", help="A table of choices: YAML, TOML or JSON."),
        _integer("--max-path-len", "Nodes of a tree's longest path, root included, at most."),
        _integer("--max-decoding-tokens", "Nodes of a tree, root included, at most."),
        _integer("--max-non-leaves-per-layer", "A tree's nodes with children at one depth, at most."),
        click.option(
            "--capture-layers",
            type=IntegerList(),
            metavar="B,B,B",
            help="Boundaries that the head reads, in place of its config's.",
        ),
        _integer("--draft-window", "The head attends to the first 4 and the last N rows only."),
        _integer(
            "--prompt-lookup-min", f"Tokens of an n-gram, at least.  [default: {SpeculativeConfig.prompt_lookup_min}]"
        ),
        _integer("--prompt-lookup-max", f"At most.  [default: {SpeculativeConfig.prompt_lookup_max}]"),
        click.option("--strict", is_flag=True, default=None, help="A head that does not fit is an error."),
        _number("--simulated-accept-length", "Impose so many tokens a step; the text then means nothing."),
        _integer("--simulated-seed", "Seed of the imposed acceptance."),
    ]
    return _apply(options, function)


def speculative_config(values: Mapping[str, Any], default_head: Path | None = None) -> SpeculativeConfig | None:
    """Build SpeculativeConfig from the options given; None where the method needs a head and there is none.

    Raises ConfigError for values out of range, and a usage error for an option of speculation without a head.
    """
    names = SpeculativeConfig.__dataclass_fields__.keys() - {"model"}
    given = {name: values[name] for name in names if values.get(name) is not None}
    head, needs_head = values.get("head"), "model" in METHOD_OPTIONS[given.get("method", SpeculativeConfig.method)]
    if needs_head and head is None:
        head = default_head
    if needs_head and head is None:
        if given:
            option = "--" + min(given).replace("_", "-")
            raise click.UsageError(f"{option} needs --head DIR: without a head there is no speculation")
        return None
    if "tree" in given and "num_speculative_tokens" not in given:
        from lowlat.speculators.tree.topology import TreeTopology

        given["num_speculative_tokens"] = TreeTopology.from_choices(given["tree"]).depth
    return SpeculativeConfig(model=head, **given)


def runtime_options(function: F) -> F:
    """Add device, dtype, executor and context of a runtime."""
    own = RuntimeConfig
    options: list[Callable[[F], F]] = [
        _integer("--max-context", f"Tokens of prompt and text.  [default: {own.max_context}, or the model's if less]"),
        click.option("--device", default=own.device, show_default=True, help="auto, cpu, cuda or cuda:N."),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bfloat16", "float32"]),
            default=own.dtype,
            show_default=True,
            help="Compute dtype; auto is the checkpoint's.",
        ),
        click.option(
            "--executor",
            type=click.Choice(["auto", "reference", "eager", "graph"]),
            default=own.executor,
            show_default=True,
            help="How steps are run.",
        ),
    ]
    return _apply(options, function)


def trace_config(names: str | None) -> TraceConfig:
    """The traces named with commas between them; an unknown one is a usage error."""
    known = list(TraceConfig.__dataclass_fields__)
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise click.BadParameter(f"{name!r:.40} is no trace; known: {', '.join(known)}", param_hint="--trace")
    return TraceConfig(**dict.fromkeys(wanted, True))


def as_json(function: F) -> F:
    """Add the flag --json."""
    return click.option("--json", "json_output", is_flag=True, help="Write one JSON object and nothing else.")(function)
