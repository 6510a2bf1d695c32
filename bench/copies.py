"""Tokens a step where an answer copies: real edits, quotations and JSON, with wide steps, and without.

    python -m bench.copies --out bench/results/cpu/copies.json
    python -m bench.copies --pair chat --limit 1 --out bench/results/cpu/copies_chat.json
    python -m bench.copies --texts FILE --target DIR --head DIR --device cuda --out FILE

The texts are this repository's: a source file with a function renamed and a line put in; paragraphs of its guides,
quoted between words of one's own; rows of a result file under their JSON schema, of which some numbers change. A prompt
holds the file, the guide, or the schema and the rows. A small model would not write these answers, so they are imposed:
after the target's own pass each row's likeliest token is made the answer's. Features, drafts of the model and all else
are as in any step. `--own` lets the target write for itself.

A span is a run of tokens of the answer, 64 or more, that stands in the prompt. A step counts as inside where all of its
tokens lie in one span; the steps that begin a copy are among them. S = 0 has one token a step by definition.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.acceptance import DEMO, conditions_of, runs_on, write_result
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.graphs.program import Op
from lowlat.options.directories import cache_directory
from lowlat.tools.chat_model import fetch_chat_model

__all__ = ["Copied", "Text", "imposed", "main", "repository_texts", "spans_of"]

ROOT = Path(__file__).resolve().parents[1]
SPAN = 64  # tokens of an answer that stand in its prompt, at least, to count
SOURCES = ("lowlat/options/limits.py", "graphs/buckets.py", "ipc/wake.py", "lowlat/engine/launches/pace.py")
GUIDES = ("lowlat/speculators/README.md", "lowlat/step/README.md", "lowlat/USING.md", "kernels/notes/bookkeeping.md")
RESULTS = ("bench/results/cpu/pricing.json", "bench/results/cpu/load.json", "bench/results/cpu/streams_soak.json")
MOST_CHARACTERS = 3400  # of a document, so that prompt and answer fit a small context
IMPOSED = "the target's choices, which are those of real texts; drafts and what is accepted of them follow from that"
# what is compared: the option's rows, and the draft length
WAYS = {"S = 7": (0, 7), "R = 16": (16, 7), "R = 32": (32, 7), "S = 3": (0, 3), "R = 16, S = 3": (16, 3)}


@dataclass(frozen=True)
class Text:
    """A prompt and the answer to it; `kind` is "edit", "quotation" or "json"."""

    kind: str
    name: str
    prompt: str
    answer: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode every text every way, and write rows by kind and over all."""
    options = _options(arguments)
    texts = _read(options.texts) if options.texts else list(repository_texts())
    rows, places = [], set()
    for way in options.way:
        wide_rows, depth = WAYS[way]
        config = SpeculativeConfig(
            options.head, num_speculative_tokens=depth, text_drafts="suffix", wide_rows=wide_rows, strict=True
        )
        sizes: dict[str, Any] = {"max_batch": 1, "max_context": options.context, "prefix_reuse": False}
        executor = "reference"
        with Runtime.load(options.target, config, device=options.device, executor=executor, **sizes) as runtime:
            places.add(runs_on(runtime))
            found = [(text, _decode(runtime, text, options)) for text in _limited(texts, options.limit)]
        for kind in (*dict.fromkeys(text.kind for text, _ in found), "all"):
            every = [each for text, each in found if kind in (text.kind, "all")]
            rows.append(
                {
                    "pair": options.pair,
                    "way": way,
                    "kind": kind,
                    "num_speculative_tokens": depth,
                    "wide_rows": wide_rows,
                }
            )
            rows[-1] |= Copied.added(every).row()
            print(json.dumps(rows[-1]), flush=True)
        _write(options, rows, places)
    return 0


def _write(options: argparse.Namespace, rows: list[dict[str, Any]], places: set[str]) -> None:
    conditions = {
        **conditions_of(options),
        "runs_on": sorted(places),
        "head": options.head.name,
        "span": SPAN,
        **({} if options.own else {"simulated": IMPOSED}),
        "texts_a_kind": options.limit,
    }
    write_result(options.out, {"conditions": conditions, "rows": rows})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=("bundled", "chat"), default="bundled")
    parser.add_argument("--target", type=Path, default=None, help="in place of the pair's")
    parser.add_argument("--head", type=Path, default=None, help="EAGLE3 draft model, in place of the pair's")
    parser.add_argument("--texts", type=Path, default=None, help="JSON: a list of {kind, name, prompt, answer}")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS)[:3])
    parser.add_argument("--limit", type=int, default=3, help="texts of a kind")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer, at most")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--own", action="store_true", help="the target writes its answers for itself")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.target is None:
        options.target = DEMO / "target" if options.pair == "bundled" else fetch_chat_model(cache_directory())
    if options.head is None:
        options.head = DEMO / ("head" if options.pair == "bundled" else "chat_head")
    return options


def _read(path: Path) -> list[Text]:
    return [Text(**each) for each in json.loads(path.read_text(encoding="utf-8"))]


def _limited(texts: Sequence[Text], limit: int) -> Iterator[Text]:
    for kind in dict.fromkeys(text.kind for text in texts):
        yield from [text for text in texts if text.kind == kind][:limit]


def repository_texts() -> Iterator[Text]:
    """Texts of this repository's files, always the same for the same files."""
    for name in SOURCES:
        yield _edit(name, (ROOT / name).read_text(encoding="utf-8")[:MOST_CHARACTERS])
    for name in GUIDES:
        yield _quotation(name, (ROOT / name).read_text(encoding="utf-8"))
    for name in RESULTS:
        yield _json(name, json.loads((ROOT / name).read_text(encoding="utf-8")))


def _edit(name: str, code: str) -> Text:
    """A file, and the file with a function renamed and a comment put in."""
    code = code[: code.rindex("\n") + 1]
    functions = re.findall(r"def (\w+)\(", code)
    function = functions[len(functions) // 2]
    renamed = re.sub(rf"\b{function}\b", f"{function}_of_all", code)
    lines = renamed.splitlines(keepends=True)
    lines.insert(3 * len(lines) // 4, "    # see above\n")
    ask = f"Rename `{function}` to `{function}_of_all`, and say where to look:"
    return Text("edit", name, f"```python\n{code}```\n\n{ask}\n\n```python\n", f"{''.join(lines)}```\n")


def _quotation(name: str, guide: str) -> Text:
    """A guide's beginning, and two of its paragraphs between words of one's own."""
    guide = guide[:MOST_CHARACTERS]
    paragraphs = [each for each in guide[: guide.rindex("\n\n")].split("\n\n") if len(each) > 300 and "|" not in each]
    first, second = paragraphs[0], paragraphs[-1]
    answer = f"The guide begins so:\n\n{first}\n\nMuch further on it says about something else:\n\n{second}\n"
    return Text("quotation", name, f"{guide}\n\nQuestion: what does the guide say?\n\nAnswer: ", answer)


def _json(name: str, content: Any) -> Text:
    """A document under its schema, and the document with every ninth number changed."""
    document = json.dumps(content, indent=1)[:MOST_CHARACTERS]
    schema = json.dumps(_schema(content))[: MOST_CHARACTERS // 2]
    numbers = iter(range(1 << 20))
    changed = re.sub(r"\d+\.\d+", lambda found: "0.5" if next(numbers) % 9 == 8 else found[0], document)
    return Text("json", name, f"{schema}\n\n{document}\n\nThe same, measured again:\n\n", f"{changed}\n")


def _schema(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"type": "object", "properties": {name: _schema(each) for name, each in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": _schema(value[0]) if value else {}}
    return {"type": "string" if isinstance(value, str) else "number"}


@dataclass
class Copied:
    """What one answer, or several, took: tokens and steps, in all and inside spans, and seconds of decoding."""

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    spans: int = 0
    span_tokens: int = 0
    span_steps: int = 0
    wide_steps: int = 0
    decode_s: float = 0.0

    @classmethod
    def of(cls, prompt: Sequence[int], steps: Sequence[Sequence[int]]) -> "Copied":
        """Of an answer by the tokens of its steps; the first came out of prefill, and is in none."""
        answer = [token for step in steps for token in step]
        spans = spans_of(prompt, answer)
        found = cls(1, len(answer) - len(steps[0]), len(steps) - 1, len(spans))
        begin = len(steps[0])
        for step in steps[1:]:
            end = begin + len(step)
            if any(first <= begin and end <= last for first, last in spans):
                found.span_steps += 1
                found.span_tokens += len(step)
            begin = end
        return found

    @classmethod
    def added(cls, every: Sequence["Copied"]) -> "Copied":
        """The sum of all."""
        return cls(*(sum(getattr(each, name) for each in every) for name in cls.__dataclass_fields__))

    def row(self) -> dict[str, Any]:
        """Return the figures of a row, as JSON."""
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens / max(self.steps, 1), 2),
            "spans": self.spans,
            "span_tokens": self.span_tokens,
            "span_steps": self.span_steps,
            "span_tokens_per_step": round(self.span_tokens / max(self.span_steps, 1), 2),
            "wide_steps": self.wide_steps,
            "decode_tokens_per_s": round(self.tokens / self.decode_s, 1) if self.decode_s else None,
        }


def spans_of(prompt: Sequence[int], answer: Sequence[int], least: int = SPAN) -> list[tuple[int, int]]:
    """The runs [first, last) of an answer that stand in a prompt, of `least` tokens or more, as long as they can be."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(prompt) - least + 1):
        places.setdefault(tuple(prompt[place : place + least]), []).append(place)
    spans: list[tuple[int, int]] = []
    for first in range(len(answer) - least + 1):
        last = first
        for place in places.get(tuple(answer[first : first + least]), ()):
            count = least
            while (
                first + count < len(answer)
                and place + count < len(prompt)
                and answer[first + count] == prompt[place + count]
            ):
                count += 1
            last = max(last, first + count)
        if last > first and not any(begin <= first and last <= end for begin, end in spans):
            spans.append((first, last))
    return spans


def imposed(known: Sequence[int], num_prompt: int) -> Any:
    """A hook that makes the likeliest token of each of the target's rows that which follows in a known answer."""
    positions = torch.empty(0)

    def after(op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        nonlocal positions
        if op.kind in ("gather_rows", "begin_step") and "row_positions" in arguments:
            positions = arguments["row_positions"].reshape(-1)
        for argument, name in op.writes.items():
            if name == "target.logits":
                logits = arguments[argument]
                for row, position in enumerate(positions.tolist()):
                    place = position + 1 - num_prompt
                    if 0 <= place < len(known):
                        logits[row, known[place]] = logits[row].max() + 100

    return after


def _decode(runtime: Runtime, text: Text, options: argparse.Namespace) -> Copied:
    """Decode one text."""
    codec = runtime.codec
    if codec is None:
        raise SystemExit("the texts need a tokenizer")
    prompt = codec.encode(text.prompt, add_special_tokens=False)
    answer = codec.encode(text.answer, add_special_tokens=False)
    count = min(len(answer), options.max_tokens, options.context - len(prompt))
    if count < SPAN:
        raise SystemExit(f"{text.name}: a prompt of {len(prompt)} tokens leaves no span; raise --context")
    if not options.own:
        runtime.executor.set_hook(imposed(answer, len(prompt)))
    before = runtime.summary().get("wide_verification", {}).get("steps", 0)
    name = runtime.submit(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    steps: list[tuple[int, ...]] = []
    begin = time.perf_counter()
    while runtime.busy:
        steps += [output.token_ids for output in runtime.step() if output.token_ids]
    runtime.executor.set_hook(None)
    decoded = [token for step in steps for token in step]
    if not options.own and decoded != answer[:count]:
        raise SystemExit(f"{text.name}: the answer is not what was imposed")
    found = Copied.of(prompt, steps)
    found.decode_s = runtime.metrics(name).decode_s or time.perf_counter() - begin
    found.wide_steps = runtime.summary().get("wide_verification", {}).get("steps", 0) - before
    print(f"{text.name}: {json.dumps(found.row())}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
