"""Libraries of grammars side by side: what serves structured output, and why it is that one.

    PYTHONPATH=tests python -m bench.grammar --tokenizer DIR --out bench/results/cpu/grammar.json
    PYTHONPATH=tests python -m bench.grammar --table bench/results/cpu/grammar.json

llguidance, through the state that the runtime uses, and xgrammar (`pip install xgrammar`), by its own calls, on the
same documents of the same schemas (tests/grammar_schemas.py). Each is a process of its own, as is each hostile grammar,
which has 20 s. Times are of the processor, but for hostile ones, which are by the clock; a grammar has one thread.

import_s, tokenizer_s   once in a process
compile_ms              from the schema to a matcher, p50, p99 and the longest
mask_us, four_rows_us   the mask of one row, and of a row and three drafts (then taken back), p50, p90 and p99
documents               of those that the first library made by chance, taken by this one
cases                   schemas of single keywords: held exactly, refused by name, and wrong: a document that the schema
                        forbids is allowed, or the other way round
unsupported             schemas of keywords that are rarely held: refused by name, or taken all the same
hostile                 seconds until a grammar is refused or served (with xgrammar, and 30 masks), or how it ended
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from grammar_schemas import CASES, UNSUPPORTED, WRITTEN, schema_by_chance

from bench.conditions import write_json
from lowlat.cli.options import bundled
from lowlat.text import TextCodec
from lowlat.tools.bench.machine import commit_at, processor

__all__ = ["LIBRARIES", "main", "table"]

NUM_BY_CHANCE = 60
HOSTILE_S = 20.0
DRAFTS = 3
HOSTILE: dict[str, tuple[str, Any]] = {
    "(a{1,1000}){1,1000}": ("regex", "(a{1,1000}){1,1000}"),
    "four repeats of repeats": ("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "an enum of 15,000": ("json_schema", {"enum": [f"value number {number}" for number in range(15_000)]}),
    "5,000 properties": ("json_schema", {"type": "object", "properties": {f"p{number}": {} for number in range(5000)}}),
    "ambiguous rules": ("grammar", "root ::= " + " | ".join('"a"* "b"* root' for _ in range(200)) + ' | "c"'),
}


class Matcher(Protocol):
    """One grammar at its beginning, in either library."""

    def fill(self, rows: Sequence[int], masks: np.ndarray) -> None:
        """Write the masks of a chain; rows[0] is not looked at."""

    def take(self, token: int) -> bool:
        """Commit a token; whether the grammar has it."""


class Ours:
    """llguidance as the runtime has it."""

    def __init__(self, codec: TextCodec, end_id: int) -> None:
        from lowlat.text.grammar.vocabulary import Vocabulary

        self._vocabulary, self._end_id = Vocabulary(codec, codec.vocab_size, end_id), end_id

    def compile(self, kind: str, value: Any) -> Matcher:
        from lowlat.errors import GrammarError
        from lowlat.text.grammar.matching import MatchedGrammar
        from lowlat.text.grammar.worker import library_grammar

        text = value if isinstance(value, str) else json.dumps(value)
        matcher = self._vocabulary.matcher(library_grammar(kind, text))
        if matcher.is_error():
            raise ValueError(matcher.get_error()[:200])
        state = MatchedGrammar(self._vocabulary, matcher, (self._end_id,))

        class Chain:
            def fill(self, rows: Sequence[int], masks: np.ndarray) -> None:
                state.fill(rows, range(-1, len(rows) - 1), masks)

            def take(self, token: int) -> bool:
                try:
                    state.advance((token,))
                except GrammarError:
                    return False
                return True

        return Chain()


class Theirs:
    """xgrammar by its own calls, with the separators of ours."""

    def __init__(self, codec: TextCodec, end_id: int) -> None:
        import xgrammar

        tokens = [codec.token_bytes(token) for token in range(codec.vocab_size)]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=codec.vocab_size, stop_token_ids=[end_id])
        self._library: Any = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, value: Any) -> Matcher:
        compiler = self._compiler
        if kind == "json_schema":
            how: dict[str, Any] = {"any_whitespace": False, "separators": (", ", ": "), "strict_mode": False}
            compiled = compiler.compile_json_schema(value if isinstance(value, str) else json.dumps(value), **how)
        else:
            compiled = compiler.compile_regex(value) if kind == "regex" else compiler.compile_grammar(value)
        matcher = self._library.GrammarMatcher(compiled)

        class Chain:
            def fill(self, rows: Sequence[int], masks: np.ndarray) -> None:
                num_taken = 0
                for row, token in enumerate(rows):
                    if row and (matcher.is_terminated() or not matcher.accept_token(token)):
                        masks[row:] = -1
                        break
                    num_taken += row > 0
                    if not matcher.is_terminated():
                        matcher.fill_next_token_bitmask(masks, row)
                matcher.rollback(num_taken)

            def take(self, token: int) -> bool:
                return not matcher.is_terminated() and bool(matcher.accept_token(token))

        return Chain()


LIBRARIES = {"llguidance": Ours, "xgrammar": Theirs}


def _made(library: str, codec: TextCodec, end_id: int) -> Any:
    return LIBRARIES[library](codec, end_id)


def _percentiles(values: Sequence[float], wanted: Sequence[int], scale: float) -> dict[str, float]:
    return {f"p{percent}": round(float(np.percentile(values, percent)) * scale, 2) for percent in wanted}


def _document_times(
    maker: Any, schemas: Sequence[Any], documents: Sequence[Sequence[int]], num_words: int
) -> dict[str, Any]:
    """Times of compilation and of masks along the documents."""
    compiled, one, four = [], [], []
    num_taken = 0
    masks = np.zeros((1 + DRAFTS, num_words), np.int32)
    for schema, tokens in zip(schemas, documents, strict=True):
        begin = time.process_time()
        try:
            matcher = maker.compile("json_schema", schema)
        except (RuntimeError, ValueError):
            continue
        compiled.append(time.process_time() - begin)
        for place, token in enumerate(tokens):
            begin = time.process_time()
            matcher.fill((0,), masks[:1])
            middle = time.process_time()
            matcher.fill((0, *tokens[place : place + DRAFTS]), masks[: 1 + len(tokens[place : place + DRAFTS])])
            four.append(time.process_time() - middle)
            one.append(middle - begin)
            if not matcher.take(token):
                break
        else:
            num_taken += 1
    return {
        "compile_ms": {**_percentiles(compiled, (50, 99), 1e3), "max": round(max(compiled) * 1e3, 2)},
        "mask_us": _percentiles(one, (50, 90, 99), 1e6),
        "four_rows_us": _percentiles(four, (50, 90, 99), 1e6),
        "documents": [num_taken, len(documents)],
    }


def _coverage(maker: Any, codec: TextCodec, end_id: int) -> dict[str, Any]:
    """How the schemas of single keywords are held."""
    held = refused = 0
    wrong: list[str] = []
    masks = np.zeros((1, (codec.vocab_size + 31) // 32), np.int32)
    for schema, valid, invalid in CASES:
        try:
            for value in (*valid, *invalid):
                matcher = maker.compile("json_schema", json.dumps(schema))
                text = json.dumps(value, ensure_ascii=False)
                taken = all(map(matcher.take, codec.encode(text, add_special_tokens=False)))
                if taken:
                    matcher.fill((0,), masks)
                    taken = bool(masks[0, end_id >> 5] >> (end_id & 31) & 1)
                if taken != (value in valid and not any(value is one for one in invalid)):
                    wrong.append(json.dumps([schema, value])[:100])
                    break
            else:
                held += 1
        except (RuntimeError, ValueError):
            refused += 1
    not_refused = []
    for schema in UNSUPPORTED:
        try:
            maker.compile("json_schema", json.dumps(schema)).fill((0,), masks)
            not_refused.append(json.dumps(schema)[:80])
        except Exception:  # whatever each library raises
            continue
    return {
        "cases": {"held": held, "refused": refused, "wrong": wrong},
        "unsupported": {"schemas": len(UNSUPPORTED), "taken": not_refused},
    }


def measure(library: str, tokenizer: Path, documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A library's row, in this process."""
    codec = _codec(tokenizer)
    begin = time.process_time()
    __import__(library)
    imported = time.process_time()
    end_id = min(codec.added_tokens())
    maker = _made(library, codec, end_id)
    made = time.process_time()
    schemas = _schemas()
    row = {
        "library": library,
        "import_s": round(imported - begin, 2),
        "tokenizer_s": round(made - imported, 2),
        **_document_times(maker, schemas, documents, (codec.vocab_size + 31) // 32),
        **_coverage(maker, codec, end_id),
    }
    return row | {"resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}


def _hostile(library: str, tokenizer: Path, name: str) -> float:
    codec = _codec(tokenizer)
    end_id = min(codec.added_tokens())
    if library == "llguidance":
        return _hostile_to_ours(codec, end_id, *HOSTILE[name])
    maker = _made(library, codec, end_id)
    masks = np.zeros((1, (codec.vocab_size + 31) // 32), np.int32)
    begin = time.perf_counter()
    try:
        matcher = maker.compile(*HOSTILE[name])
        token = 0
        for _ in range(30):
            matcher.fill((0,), masks)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
            token = int(allowed[len(allowed) // 2])
            if not matcher.take(token):
                break
    except Exception as error:  # whatever each library raises: it is refused
        print(type(error).__name__, file=sys.stderr)
    return time.perf_counter() - begin


def _hostile_to_ours(codec: TextCodec, end_id: int, kind: str, value: Any) -> float:
    """The same through the compiler, which tries a grammar first, and refuses it or serves it."""
    from lowlat.errors import RequestError
    from lowlat.options.request import SamplingParams
    from lowlat.text.grammar.compiler import GrammarCompiler

    compiler = GrammarCompiler(codec, codec.vocab_size, (end_id,))
    compiler.compile(SamplingParams(regex="ready"))
    options: dict[str, Any] = {kind: value}
    begin = time.perf_counter()
    try:
        compiler.compile(SamplingParams(**options))
    except RequestError as error:
        print(error, file=sys.stderr)
    spent = time.perf_counter() - begin
    compiler.close()
    return spent


def _codec(tokenizer: Path) -> TextCodec:
    codec = TextCodec.load(tokenizer)
    if codec is None:
        raise SystemExit(f"{tokenizer} has no tokenizer.json")
    return codec


def _schemas() -> list[Any]:
    return [*WRITTEN.values(), *map(schema_by_chance, range(NUM_BY_CHANCE))]


def _documents(tokenizer: Path) -> list[list[int]]:
    """A document of each schema, made by chance through the first library's masks, as the tokenizer writes it."""
    from grammars import PADDING, text_of, walk

    from lowlat.options.request import SamplingParams
    from lowlat.text.grammar.compiler import GrammarCompiler

    codec = _codec(tokenizer)
    compiler = GrammarCompiler(codec, codec.vocab_size + PADDING, (0,))
    documents = []
    for schema in _schemas():
        found = None
        for seed in range(9):
            state = compiler.open(SamplingParams(json_schema=schema), (1,), (0,))
            found = None if state is None else walk(state, codec, seed, 200)
            if found is not None:
                break
        documents.append(codec.encode(text_of(codec, found or []), add_special_tokens=False))
    compiler.close()
    return documents


def _in_process(*arguments: str, stdin: str = "", limit_s: float = 80.0) -> tuple[Any, str]:
    """The JSON that this program prints with these arguments, and "", or what became of it."""
    command = [sys.executable, "-m", "bench.grammar", *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return None, f"not within {limit_s:g} s"
    if done.returncode:
        return None, f"ended with {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    titles = ("import, s", "tokenizer, s", "compile, ms", "one mask, us", "four rows, us", "documents", "cases", "MiB")
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for row in result["rows"]:
        cases = row["cases"]
        shown = f"{cases['held']} held, {cases['refused']} refused, {len(cases['wrong'])} wrong"
        cells = [
            row["library"],
            f"{row['import_s']}",
            f"{row['tokenizer_s']}",
            *(
                " / ".join(str(value) for value in row[name].values())
                for name in ("compile_ms", "mask_us", "four_rows_us")
            ),
            f"{row['documents'][0]} of {row['documents'][1]}",
            shown,
            str(row["resident_mib"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| hostile, s | " + " | ".join(row["library"] for row in result["rows"]) + " |", "|---|---|---|"]
    for name in HOSTILE:
        lines.append(f"| {name} | " + " | ".join(str(row["hostile"][name]) for row in result["rows"]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write, or print the table of a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=Path(bundled("target")))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--hostile", choices=HOSTILE)
    asked = parser.parse_args(arguments)
    if asked.table is not None:
        print(table(json.loads(asked.table.read_text())))
        return
    if asked.library is not None:
        if asked.hostile is not None:
            print(json.dumps(round(_hostile(asked.library, asked.tokenizer, asked.hostile), 3)))
        else:
            print(json.dumps(measure(asked.library, asked.tokenizer, json.load(sys.stdin))))
        return
    documents = json.dumps(_documents(asked.tokenizer))
    rows = []
    for library in LIBRARIES:
        own = ("--library", library, "--tokenizer", str(asked.tokenizer))
        row, problem = _in_process(*own, stdin=documents)
        if row is None:
            raise SystemExit(f"{library}: {problem}")
        tried = {name: _in_process(*own, "--hostile", name, limit_s=HOSTILE_S) for name in HOSTILE}
        rows.append(row | {"hostile": {name: problem or seconds for name, (seconds, problem) in tried.items()}})
    stamps = {
        "commit": commit_at(Path(__file__).parent),
        "machine": processor(),
        "tokenizer": f"{asked.tokenizer.name}, {_codec(asked.tokenizer).vocab_size} tokens",
        "schemas": len(_schemas()),
    }
    result = {"conditions": stamps, "rows": rows}
    if asked.out is not None:
        write_json(asked.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
