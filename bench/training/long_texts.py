"""Join the documents of a text into long ones, for training and for measuring at long contexts.

    python -m bench.training.long_texts --text FILE --out long.txt.xz --held-out held_out.json.xz [--megabytes 100]
        [--characters 480000] [--withhold NAME=BEGINNING ...]

Few documents fill a context of 128K tokens, so neighbours are joined, in the file's order and a blank line apart, until
there are `--characters`. Neighbours of a file are mostly of one source: each long text is then, too. Held out are

    unseen    documents that `is_held_out` names, which no model here was ever trained on, joined among themselves
    withheld  the long text that begins at the first document that begins with each `--withhold`; a target that was
              trained on the same file has seen its documents, in rows of its own length

Both go to `--held-out`, JSON of name -> text; the others, every so many of them as fit `--megabytes`, to `--out`.
"""

import argparse
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bench.training.corpus import END_OF_TEXT, read_documents, split

UNSEEN = "unseen "
Item = TypeVar("Item")

__all__ = ["join_neighbours", "main", "named", "read_texts", "spread", "withhold"]


def join_neighbours(documents: Sequence[str], num_characters: int) -> Iterator[str]:
    """Yield texts of at least `num_characters` made of consecutive documents; what is left at the end is dropped."""
    parts: list[str] = []
    length = 0
    for document in documents:
        parts.append(document)
        length += len(document) + 2
        if length >= num_characters + 2:
            yield "\n\n".join(parts)
            parts, length = [], 0


def withhold(
    documents: Sequence[str], beginnings: Mapping[str, str], num_characters: int
) -> tuple[dict[str, str], list[str]]:
    """Take a long text out of the documents for each name's beginning; return them by name, and the other documents.

    Raises ValueError for a beginning that no document has, or after which there are too few characters.
    """
    found: dict[str, str] = {}
    others = list(documents)
    for name, beginning in beginnings.items():
        first = next((i for i, document in enumerate(others) if document.startswith(beginning)), None)
        if first is None:
            raise ValueError(f"no document begins with {beginning!r}, or another --withhold has taken it")
        text = next(join_neighbours(others[first:], num_characters), None)
        if text is None:
            raise ValueError(f"after {beginning!r} there are fewer than {num_characters} characters (--characters)")
        found[name] = text
        taken = 0
        while taken < len(text):
            taken += len(others.pop(first)) + 2
    return found, others


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items, evenly apart and in their order; all where there are no more."""
    count = min(len(items), count)
    return [items[i * len(items) // count] for i in range(count)]


def read_texts(path: str | Path) -> dict[str, str]:
    """Read JSON of name -> text, plain or `.xz`. Raises ValueError for other content."""
    path = Path(path)
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    value = json.loads(raw)
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{path} is no JSON object of names and texts")
    return {str(name): text for name, text in value.items()}


def named(argument: str) -> tuple[str, str]:
    """Split NAME=VALUE of a command line. Raises argparse's error where a part is missing."""
    name, equals, value = argument.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {argument!r}")
    return name, value


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files and tell their sizes."""
    options = _options(arguments)
    training, unseen = split(read_documents(options.text))
    held_out, others = withhold(training, dict(options.withhold), options.characters)
    for number, text in enumerate(join_neighbours(unseen, options.characters)):
        held_out[f"{UNSEEN}{number}"] = text
    texts = list(join_neighbours(others, options.characters))
    share = 1e6 * options.megabytes / max(1, sum(len(text.encode("utf-8")) for text in texts))
    chosen = spread(texts, max(1, int(share * len(texts)))) if options.megabytes else texts
    print(f"{len(chosen)} of {len(texts)} long texts, {sum(map(len, chosen))} characters", flush=True)
    print(f"held out: {', '.join(held_out)}", flush=True)
    _write(options.out, f"\n{END_OF_TEXT}\n".join(chosen))
    _write(options.held_out, json.dumps(held_out, ensure_ascii=False))


def _write(path: Path, text: str) -> None:
    raw = text.encode("utf-8")
    path.write_bytes(lzma.compress(raw, preset=9) if path.suffix == ".xz" else raw)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Join the documents of a text into long ones.")
    parser.add_argument("--text", required=True, help="documents separated by <|endoftext|> lines; .xz is read too")
    parser.add_argument("--out", type=Path, required=True, help="file of long texts to train on; .xz is compressed")
    parser.add_argument("--held-out", type=Path, required=True, help="JSON file of those to measure on; .xz as well")
    parser.add_argument("--characters", type=int, default=480_000, help="of a long text at least")
    parser.add_argument("--megabytes", type=float, default=0.0, help="of texts to train on; 0: all")
    parser.add_argument(
        "--withhold", nargs="*", type=named, default=[], metavar="NAME=BEGINNING", help="of documents to keep back"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
