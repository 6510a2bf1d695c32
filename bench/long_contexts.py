"""Acceptance and speed by the length of the context: the same places of long texts behind more or less of what stands
before them, for several draft models of one target.

    python -m bench.long_contexts --target DIR --draft-model bundled=lowlat/demo/head yarn=DIR \\
        bundled@512=lowlat/demo/head@512 --texts held_out.json.xz --contexts 2048 8192 32768 131072 --out FILE

NAME=DIR@WINDOW drafts with `draft_window`. Texts are those that `bench.training.long_texts` holds out, as are their
groups. A context of C tokens ends at the text's token `--place` (the largest context by default), less room for what
follows, whatever C is: so rows of one draft model differ by the context's length alone. Every prompt is decoded at S
and at S = 0 in one runtime, greedy and sampled; nothing is imposed, and tokens are compared. Rows are a draft model, a
context, a temperature and a group of texts; `looping` counts prompts whose completion repeats itself, which is easy to
draft. Past `--minutes` no other context is begun, and what was measured is written: `left_out` says what was not.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.acceptance import Baselines, Sum, conditions_of, runs_on, text_loops, write_result
from bench.training.long_texts import is_unseen, named, read_texts, spread
from lowlat import Runtime, SamplingParams, SpeculativeConfig

__all__ = ["DraftSubject", "main"]

WARM_UP = 16  # tokens of a prompt, and behind it, that are decoded before anything is measured
GROUPS = ("all", "unseen", "withheld")
OMITTED = ("domain", "tokens_per_s", "baseline_tokens_per_s")  # of an acceptance row: prefill is in these times


@dataclass(frozen=True)
class DraftSubject:
    """A draft model by its name in the rows, and the window that it is run with; None: its own."""

    name: str
    directory: Path
    window: int | None

    @classmethod
    def parse(cls, argument: str) -> "DraftSubject":
        """Read NAME=DIR or NAME=DIR@WINDOW."""
        name, value = named(argument)
        directory, at, window = value.rpartition("@")
        if not at:
            return cls(name, Path(value), None)
        if not window.isdecimal() or not int(window):
            raise argparse.ArgumentTypeError(f"expected NAME=DIR@WINDOW with a window above 0, got {argument!r}")
        return cls(name, Path(directory), int(window))


class _Completions(Baselines):
    """Completions that are as long as asked for, whatever ends a text."""

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=1, ignore_eos=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write after each context what there is so far."""
    options = _options(arguments)
    end, rows = time.monotonic() + 60 * options.minutes, list[dict[str, Any]]()
    left_out = [[subject.name, context] for subject in options.draft_model for context in options.contexts]
    conditions = _conditions(options)
    result = {"conditions": conditions, "rows": rows, "left_out": left_out}
    prompts: dict[str, list[int]] = {}
    for subject in options.draft_model:
        if time.monotonic() > end:
            break
        with _load(options, subject) as runtime:
            conditions["runs_on"] = runs_on(runtime)
            prompts = prompts or _prompts(runtime, options)
            _Completions(WARM_UP).both(
                runtime, next(iter(prompts.values()))[:WARM_UP], 0.0, options.num_speculative_tokens
            )
            for context in options.contexts:
                if time.monotonic() > end:
                    break
                for row in _rows(runtime, subject, context, prompts, options):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                left_out.remove([subject.name, context])
                write_result(options.out, result)
    write_result(options.out, result)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft-model", nargs="+", type=DraftSubject.parse, required=True, metavar="NAME=DIR[@WINDOW]")
    parser.add_argument("--texts", type=Path, required=True, help="JSON: name -> text; .xz is read too")
    parser.add_argument("--limit", type=int, default=64, help="texts, of all evenly")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768, 65536, 131072], help="tokens")
    parser.add_argument("--place", type=int, help="the token of a text where contexts end; the largest by default")
    parser.add_argument("--max-tokens", type=int, default=128, help="that follow each; a context has room for them")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no other context is begun")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.contexts = sorted(options.contexts)
    options.place = options.place or options.contexts[-1]
    if options.place < options.contexts[-1]:
        parser.error(f"--place {options.place} is below the largest of --contexts, {options.contexts[-1]}")
    if _room(options) >= options.contexts[0]:
        parser.error(f"--contexts {options.contexts[0]} leaves no prompt before --max-tokens {options.max_tokens}")
    return options


def _room(options: argparse.Namespace) -> int:
    """Positions of a context that its prompt leaves free: for the completion, and for drafts behind it."""
    room: int = options.max_tokens + options.num_speculative_tokens + 1
    return room


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **conditions_of(options),
        "num_speculative_tokens": options.num_speculative_tokens,
        "place": options.place,
        "draft_models": {each.name: each.directory.name for each in options.draft_model},
    }


def _load(options: argparse.Namespace, subject: DraftSubject) -> Runtime:
    """A runtime of the largest context, whose prompts share what they begin with."""
    drafting = SpeculativeConfig(
        method="eagle3",
        model=subject.directory,
        draft_window=subject.window,
        num_speculative_tokens=options.num_speculative_tokens,
        strict=True,
    )
    return Runtime.load(options.target, drafting, device=options.device, max_batch=1, max_context=options.contexts[-1])


def _prompts(runtime: Runtime, options: argparse.Namespace) -> dict[str, list[int]]:
    """The tokens of each text up to the place where prompts end."""
    if runtime.codec is None:
        raise SystemExit(f"{options.target} has no tokenizer")
    end = options.place - _room(options)
    found = {}
    for name, text in spread(list(read_texts(options.texts).items()), options.limit):
        tokens = runtime.codec.encode(text, add_special_tokens=False)
        if len(tokens) < end:
            raise SystemExit(f"the text {name!r} has {len(tokens)} tokens, and prompts end at {end} (--place)")
        found[name] = tokens[:end]
    return found


def _rows(
    runtime: Runtime,
    subject: DraftSubject,
    context: int,
    prompts: dict[str, list[int]],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """The rows of one draft model and context."""
    start, length = time.perf_counter(), context - _room(options)
    totals = {(temperature, group): Sum() for temperature in options.temperature for group in GROUPS}
    looping = dict.fromkeys(totals, 0)
    for name, tokens in prompts.items():
        prompt, completions = tokens[len(tokens) - length :], _Completions(options.max_tokens)
        for temperature in options.temperature:
            one, written = completions.both(runtime, prompt, temperature, options.num_speculative_tokens)
            for group in ("all", "unseen" if is_unseen(name) else "withheld"):
                totals[temperature, group].add(one)
                looping[temperature, group] += text_loops(written)
    seconds = round(time.perf_counter() - start, 1)
    for (temperature, group), total in totals.items():
        if not total.prompts:
            continue
        figures = total.row(group, temperature)
        yield {
            "draft_model": subject.name,
            "draft_window": subject.window,
            "context": context,
            "texts": group,
            **{key: value for key, value in figures.items() if key not in OMITTED},
            "looping": looping[temperature, group],
            "ms_per_step": round(1e3 * total.decode_seconds / total.steps, 4),
            "baseline_ms_per_step": round(1e3 * total.baseline_decode_seconds / total.decoded, 4),
            "s_of_context": seconds,
        }


if __name__ == "__main__":
    main()
