"""This program runs JSON-Schema-Test-Suite on structured output: a schema is enforced, or refused by name.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite DIR
    python -m bench.schema_suite DIR --out bench/results/cpu/schema_suite.json

For each schema of the draft's files, the optional formats among them: it is compiled, or refused. Of one that was
served, walks by chance under its masks make documents, which must validate with `jsonschema`; and the suite's own
documents, written as grammars have them, must be allowed to their end only where they validate. A grammar that leaves
valid documents out (of another order of properties, for one) is narrower than its schema, which is no fault: they are
counted apart.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grammars import END, allowed, codec_with, dumped, mask_of, state_of, text_of, walk
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from bench.lib.conditions import write_json
from lowlat.errors import GrammarError, RequestError
from lowlat.text.grammar.state import GrammarState
from lowlat.tools.bench.machine import commit_at

DRAFT = "draft2020-12"
ROOT = "http://localhost:1234/"  # where the suite says that its remote schemas lie
COUNTS = (
    *("schemas", "refused", "served", "wrong", "walks", "walks_ended"),
    *("documents_wrong", "documents_unjudged"),
    *("valid_allowed", "valid_left_out", "invalid_left_out", "invalid_allowed"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the files, write what was counted; 1 where a grammar allows what its schema forbids."""
    options = _options(arguments)
    registry = _remotes(options.directory / "remotes")
    rows, faults, reasons, totals = [], [], Counter[str](), Counter[str]()
    for path in _files(options.directory / "tests" / DRAFT, options.only):
        keyword = path.relative_to(options.directory / "tests" / DRAFT).with_suffix("").as_posix()
        counts = dict.fromkeys(COUNTS, 0)
        for case in json.loads(path.read_text(encoding="utf-8")):
            found = _try(case, registry, range(options.walks))
            reasons.update(found.pop("refusal"))
            faults += [{"keyword": keyword, **fault} for fault in found.pop("faults")]
            for name, count in found.items():
                counts[name] += count
        totals.update(counts)
        rows.append({"keyword": keyword, **counts})
        print(json.dumps(rows[-1]), file=sys.stderr)
    result = {
        "conditions": {
            "suite": commit_at(options.directory) or options.suite_commit or "unknown",
            "draft": DRAFT,
            "walks": options.walks,
            "commit": commit_at(Path(__file__).parent) or "unknown",
        },
        "totals": dict(totals),
        "refusals": dict(reasons.most_common()),
        "faults": faults,
        "rows": rows,
    }
    if options.out is None:
        print(json.dumps(result, indent=1))
    else:
        write_json(options.out, result)
    return 1 if faults else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--walks", type=int, default=5, help="documents by chance of each schema")
    parser.add_argument("--only", help="files whose name has this")
    parser.add_argument("--suite-commit", default="", help="of the suite, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, help="JSON file; without it the result is printed")
    return parser.parse_args(arguments)


def _files(directory: Path, only: str | None) -> Iterator[Path]:
    """The draft's own files, and of the optional ones those of formats: others are no part of what a schema says."""
    for path in (*sorted(directory.glob("*.json")), *sorted(directory.glob("optional/format/*.json"))):
        if only is None or only in path.stem:
            yield path


def _remotes(directory: Path) -> "Registry[Any]":
    """The suite's remote schemas, for the validator: grammars refuse such references."""
    registry: Registry[Any] = Registry()
    for path in sorted(directory.rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        name = ROOT + path.relative_to(directory).as_posix()
        registry = registry.with_resource(name, DRAFT202012.create_resource(content))
    return registry


def _try(case: dict[str, Any], registry: "Registry[Any]", seeds: range) -> dict[str, Any]:
    """Counts of one schema, why it was refused, and what its grammar does wrong."""
    codec, schema, counts = codec_with(), json.dumps(case["schema"]), Counter(schemas=1)
    faults: list[dict[str, Any]] = []
    try:
        state_of(codec, json_schema=schema)
    except RequestError as error:
        return {**counts, "refused": 1, "faults": faults, "refusal": [_kind(str(error))]}
    checker = Draft202012Validator.FORMAT_CHECKER
    validator = Draft202012Validator(case["schema"], format_checker=checker, registry=registry)

    def fault(name: str, text: str) -> None:
        counts[name] += 1
        faults.append({"case": case["description"], "schema": schema, "document": text, "fault": name})

    for seed in seeds:
        counts["walks"] += 1
        tokens = walk(state_of(codec, json_schema=schema), codec, seed)
        if tokens is not None:
            counts["walks_ended"] += 1
            text = text_of(codec, tokens)
            valid = _is_valid(validator, json.loads(text))
            counts["documents_unjudged"] += valid is None
            if valid is False:
                fault("documents_wrong", text)
    for test in case["tests"]:
        taken = _takes(state_of(codec, json_schema=schema), dumped(test["data"]))
        if test["valid"]:
            counts["valid_allowed" if taken else "valid_left_out"] += 1
        elif taken:
            fault("invalid_allowed", dumped(test["data"]))
        else:
            counts["invalid_left_out"] += 1
    return {**counts, "served": 1, "wrong": int(bool(faults)), "faults": faults, "refusal": []}


def _is_valid(validator: Draft202012Validator, value: Any) -> bool | None:
    """Whether a document validates; None where the validator cannot tell, such as for expressions that Python lacks."""
    try:
        return bool(validator.is_valid(value))
    except (Unresolvable, re.error):
        return None


def _takes(state: GrammarState, text: str) -> bool:
    """Whether a grammar allows a text to its end."""
    codec = codec_with()
    try:
        state.advance(codec.encode(text, add_special_tokens=False))
        return END in allowed(mask_of(state, codec)[0])
    except GrammarError:
        return False


def _kind(message: str) -> str:
    """A refusal without the names and numbers of one schema."""
    return re.sub(r"'[^']*'|/[^/ ]*/|[0-9][0-9.]*", "...", message.removeprefix("json_schema: "))[:80]


if __name__ == "__main__":
    sys.exit(main())
