"""Text for training: read, split by document, tokenize, pack, shuffle.

A text file holds documents separated by a line `<|endoftext|>`; a name that ends in `.xz` is decompressed on the way
in. The split is by a hash of each document, so that it stays the same whatever else is in the file. Documents of one
source usually stand in runs; they are shuffled before packing.
"""

import hashlib
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_SHARE = 64  # one document in so many is never trained on


__all__ = ["END_OF_TEXT", "is_held_out", "pack", "read_documents", "read_prompts", "split", "tokenize"]


def read_documents(path: str | Path) -> list[str]:
    """Return the non-empty documents of a text file, plain or `.xz`, in their order."""
    path = Path(path)
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    pieces = raw.decode("utf-8").split(f"\n{END_OF_TEXT}\n")
    return [piece.strip("\n") for piece in pieces if piece.strip()]


def is_held_out(document: str) -> bool:
    """Say whether a document belongs to the held-out share; depends on its text alone."""
    digest = hashlib.sha256(document.encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_SHARE == 0


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (training documents, held-out documents); a text that occurs twice falls on one side."""
    training: list[str] = []
    held_out: list[str] = []
    for document in documents:
        (held_out if is_held_out(document) else training).append(document)
    return training, held_out


def tokenize(tokenizer: Any, documents: Sequence[str], *, separator: int | None, seed: int = 0) -> "NDArray[np.int32]":
    """Return the documents, shuffled, as one array of token ids with `separator` before each.

    tokenizer   anything callable as Hugging Face's: `tokenizer(list of str)["input_ids"]`
    separator   the id put before each document, or None for nothing
    result      [num_tokens] int32
    Long documents are cut at line ends first, so that the threads of a fast tokenizer share the work.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    pieces: list[str] = []
    starts: list[bool] = []
    for index in order:
        for number, piece in enumerate(_cut(documents[index])):
            pieces.append(piece)
            starts.append(number == 0)
    arrays: list[NDArray[np.int32]] = []
    for begin in range(0, len(pieces), 4096):
        encoded = tokenizer(pieces[begin : begin + 4096], add_special_tokens=False)["input_ids"]
        for offset, ids in enumerate(encoded):
            prefix = [separator] if separator is not None and starts[begin + offset] else []
            arrays.append(np.asarray([*prefix, *ids], dtype=np.int32))
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _cut(document: str, limit: int = 20_000) -> Iterator[str]:
    while len(document) > limit:
        end = document.rfind("\n", 1, limit)
        end = limit if end < 1 else end
        yield document[:end]
        document = document[end:]
    yield document


def pack(tokens: "NDArray[np.int32]", length: int, generator: np.random.Generator) -> "NDArray[np.int32]":
    """Cut a stream of tokens into rows from a random offset, and shuffle the rows.

    tokens   [num_tokens] int32
    result   [num_tokens // length - 1 or so, length] int32; a copy
    Raises ValueError when the stream is shorter than two rows.
    """
    if tokens.shape[0] < 2 * length:
        raise ValueError(f"the text has {tokens.shape[0]} tokens; rows of {length} need at least {2 * length}")
    offset = int(generator.integers(0, length))
    rows = (tokens.shape[0] - offset) // length
    packed = tokens[offset : offset + rows * length].reshape(rows, length)
    return packed[generator.permutation(rows)]


def read_prompts(path: str | Path) -> dict[str, list[str]]:
    """Read prompts by domain: a JSON object of lists, a JSON list, or one prompt a line (domain `all`)."""
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".json":
        value = json.loads(text)
        if isinstance(value, dict):
            return {str(domain): [str(prompt) for prompt in prompts] for domain, prompts in value.items()}
        return {"all": [str(prompt) for prompt in value]}
    return {"all": [line for line in text.splitlines() if line.strip()]}
