"""This module counts how often tokens occur in a file, separately in a part to choose by and in a held-out part.

Every tenth piece of the file is held out, so that both parts are samples of the whole file.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowlat.checkpoint.files import read_json
from lowlat.errors import ConfigError
from lowlat.text.codec import TextCodec

__all__ = ["TokenCounts", "count_text", "count_token_ids", "most_frequent"]

HELD_OUT_EVERY = 10
MIN_PIECE, MAX_PIECE = 256, 1 << 18  # characters; a piece ends with a line
PIECES = 200
MAX_JSON_BYTES = 1 << 30
SEPARATORS = re.compile(r"[\s,;\[\]]+")


@dataclass(frozen=True)
class TokenCounts:
    """Occurrences by token id, [V] int64 each."""

    chosen_by: torch.Tensor
    held_out: torch.Tensor

    def coverage(self, ids: torch.Tensor) -> float | None:
        """The share of the held-out tokens that are among the ids; None if nothing was held out."""
        total = int(self.held_out.sum())
        return int(self.held_out[ids].sum()) / total if total else None


def count_text(path: str | Path, codec: TextCodec, vocab_size: int) -> TokenCounts:
    """Count the tokens of a text file of any size, read in pieces that end with a line.

    Raises ConfigError for a file that is empty, cannot be read, is not UTF-8, or whose tokens the model lacks.
    """
    path = Path(path)
    return _count(
        path, (codec.encode(piece, add_special_tokens=False, allow_special=True) for piece in _pieces(path)), vocab_size
    )


def count_token_ids(path: str | Path, vocab_size: int) -> TokenCounts:
    """Count the ids in a file: .json has a list of ids or of such lists; others have numbers between blanks or commas.

    Raises ConfigError for anything that is no id of the vocabulary.
    """
    path = Path(path)
    return _count(path, _json_pieces(path) if path.suffix == ".json" else _number_pieces(path), vocab_size)


def most_frequent(counts: torch.Tensor, size: int, keep: Sequence[int] = ()) -> torch.Tensor:
    """Return the indices of the `size` largest counts, ascending, [size] int64; of ties the lower index wins.

    counts  [N] int64
    keep    indices that are included whatever their counts
    """
    weight = counts.clone()
    weight[list(keep)] = torch.iinfo(torch.int64).max
    return torch.argsort(weight, descending=True, stable=True)[:size].sort().values


def _count(path: Path, pieces: Iterable[list[int]], vocab_size: int) -> TokenCounts:
    parts = [torch.zeros(vocab_size, dtype=torch.int64) for _ in range(2)]
    for place, ids in enumerate(pieces):
        found = torch.tensor(ids, dtype=torch.int64)
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
            wrong = int(found.min()) if int(found.min()) < 0 else int(found.max())
            raise ConfigError(f"{path}: token id {wrong} is not from 0 to {vocab_size - 1}, the vocabulary")
        parts[place % HELD_OUT_EVERY == HELD_OUT_EVERY - 1] += torch.bincount(found, minlength=vocab_size)
    if not int(parts[0].sum()):
        raise ConfigError(f"{path}: there are no tokens in it")
    return TokenCounts(*parts)


def _pieces(path: Path) -> Iterator[str]:
    try:
        size = path.stat().st_size
        target = min(max(size // PIECES, MIN_PIECE), MAX_PIECE)
        with path.open(encoding="utf-8", newline="") as stream:
            while lines := stream.readlines(target):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _number_pieces(path: Path) -> Iterator[list[int]]:
    for piece in _pieces(path):
        words = [word for word in SEPARATORS.split(piece) if word]
        yield from _blocks(path, [_id(path, word) for word in words])


def _json_pieces(path: Path) -> Iterator[list[int]]:
    found = read_json(path, MAX_JSON_BYTES)
    if not isinstance(found, list):
        raise ConfigError(f"{path}: expected a list of token ids, or of such lists, found {type(found).__name__}")
    loose = [item for item in found if not isinstance(item, list)]
    for ids in [item for item in found if isinstance(item, list)] + [loose]:
        yield from _blocks(path, [_id(path, item) for item in ids])


def _blocks(path: Path, ids: list[int]) -> Iterator[list[int]]:
    """Yield a list in blocks, so that a file of one line has a held-out part, too."""
    size = min(max(len(ids) // PIECES, 1), 1024)
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def _id(path: Path, word: object) -> int:
    if isinstance(word, int) and not isinstance(word, bool):
        found = word
    elif isinstance(word, str) and word.isascii() and word.isdecimal() and len(word) < 19:
        found = int(word)
    else:
        raise ConfigError(f"{path}: {word!r:.40} is not a token id")
    if abs(found) >= 1 << 62:
        raise ConfigError(f"{path}: {word!r:.40} is not a token id")
    return found
