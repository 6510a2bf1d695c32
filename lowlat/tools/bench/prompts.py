"""This module makes prompts of an exact length, cut from a text's tokens or drawn at random."""

import json
import zlib
from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.files import read_text
from lowlat.errors import ConfigError
from lowlat.text import TextCodec
from lowlat.tools.bench.scenarios import Case

__all__ = ["Prompts"]

MAX_FILE = 256 << 20


class Prompts:
    """The prompts of all cases.

    name    of the text; "random"
    stream  the tokens that prompts are cut from, the text's end followed by its beginning; empty: random tokens
    """

    def __init__(self, name: str, stream: list[int], vocab_size: int) -> None:
        self.name, self.stream, self._vocab_size = name, stream, vocab_size

    @classmethod
    def random(cls, vocab_size: int) -> "Prompts":
        """Return prompts of random tokens."""
        return cls("random", [], vocab_size)

    @classmethod
    def read(cls, path: Path, codec: TextCodec | None, vocab_size: int) -> "Prompts":
        """Read text, or .json of texts or token ids, in lists or by domain. Raises ConfigError."""
        text = read_text(path, MAX_FILE)
        try:
            found = json.loads(text) if path.suffix == ".json" else text
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not valid JSON: {error!s:.200}") from error
        stream: list[int] = []
        for part in _leaves(found):
            if isinstance(part, str):
                if codec is None:
                    raise ConfigError(f"{path}: holds text, and the model has no tokenizer.json; give token ids")
                stream += codec.encode(part)
            elif type(part) is int and 0 <= part < vocab_size:
                stream.append(part)
            else:
                raise ConfigError(f"{path}: neither text nor a token id from 0 to {vocab_size - 1}: {part!r:.40}")
        if not stream:
            raise ConfigError(f"{path}: holds no prompt")
        return cls(path.name, stream, vocab_size)

    def of(self, case: Case) -> list[list[int]]:
        """Return a case's prompts, one a request; no two begin alike, and a shorter case has prefixes of a longer's."""
        return [self._one(number, case.context) for number in range(case.batch)]

    def some(self, lengths: list[int]) -> list[list[int]]:
        """Return prompts of these lengths; no two begin alike."""
        return [self._one(number, length) for number, length in enumerate(lengths)]

    def _one(self, number: int, length: int) -> list[int]:
        key = zlib.crc32(f"prompt {number}".encode())
        if not self.stream:
            generator = torch.Generator().manual_seed(key)
            tokens: list[int] = torch.randint(self._vocab_size, (length,), generator=generator).tolist()
            return tokens
        start = key % len(self.stream)
        turns = -(-(start + length) // len(self.stream))
        return (self.stream * turns)[start : start + length]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list) else [value]
