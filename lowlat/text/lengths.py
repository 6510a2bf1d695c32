"""This module computes a lower bound of a text's tokens without tokenizing it, for tokenizers that lose no bytes."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, models

from lowlat.text.streams import byte_alphabet

__all__ = ["LengthBound"]

# Canonical composition shrinks bytes by at most this factor: U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes.
MAX_COMPOSITION = 4
KEEPING = frozenset({"ByteLevel", "Digits"})  # pre-tokenizers that only cut, with any settings


class LengthBound:
    """Bounds the number of a text's tokens from below, by the most bytes that a token stands for.

    max_token_bytes   None if a token may stand for any number of bytes: then there is no bound

    There is a bound for byte-level BPE (GPT-2, Llama 3, Qwen, gpt-oss) and for BPE with a token for each byte (Llama 2,
    Mistral), unless an earlier part deletes text or an added token absorbs spaces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.max_token_bytes: int | None = None
        self._least_bytes: Callable[[str, int], int] = _all_bytes
        added = tokenizer.get_added_tokens_decoder().values()
        if not isinstance(tokenizer.model, models.BPE) or any(token.lstrip or token.rstrip for token in added):
            return
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        normalizers = _parts(tokenizer.normalizer, "normalizers")
        pre_tokenizers = _parts(tokenizer.pre_tokenizer, "pretokenizers")
        longest = 0
        if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
            if not all(_keeps(part) for part in pre_tokenizers) or not byte_alphabet().keys() <= vocabulary.keys():
                return
            if [part["type"] for part in normalizers] == ["NFC"]:
                self._least_bytes = _composed_bytes
            elif normalizers:
                return
            longest = max(map(len, vocabulary))  # a character of the alphabet stands for a byte
        elif tokenizer.model.byte_fallback:
            byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
            only_metaspace = all(part["type"] == "Metaspace" for part in pre_tokenizers)
            if not only_metaspace or not byte_tokens <= vocabulary.keys() or not all(map(_grows, normalizers)):
                return
            longest = max(len(token.encode("utf-8")) for token in vocabulary)
        if longest:
            self.max_token_bytes = max([longest, *(len(token.content.encode("utf-8")) for token in added)])

    def least_tokens(self, text: str, num_bytes: int) -> int:
        """The fewest tokens that a text can have; 0 without a bound.

        num_bytes   of the text in UTF-8
        """
        if self.max_token_bytes is None:
            return 0
        return -(-self._least_bytes(text, num_bytes) // self.max_token_bytes)


def _all_bytes(text: str, num_bytes: int) -> int:
    return num_bytes


def _composed_bytes(text: str, num_bytes: int) -> int:
    """The fewest bytes after canonical composition: an ASCII character is composed only with one that is not ASCII."""
    if text.isascii():
        return num_bytes
    num_ascii = len(text.encode("ascii", "ignore"))
    num_affected = min(num_ascii, len(text) - num_ascii)
    return num_ascii - num_affected + (num_affected + num_bytes - num_ascii) // MAX_COMPOSITION


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Flatten a normalizer or pre-tokenizer to the list of its parts, as in tokenizer.json."""
    if component is None:
        return []
    stack: list[Any] = [json.loads(component.__getstate__())]
    parts = []
    while stack:
        part = stack.pop()
        if part["type"] == "Sequence":
            stack.extend(reversed(part[name]))
        else:
            parts.append(part)
    return parts


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps every byte."""
    return part["type"] in KEEPING or (part["type"] == "Split" and part["behavior"] != "Removed")


def _grows(part: dict[str, Any]) -> bool:
    """Whether a normalizer makes no text shorter."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())
    return bool(part["type"] == "Prepend")
