"""This module checks that a draft model's tokens are the target's, by their tokenizers, or by size without these."""

import hashlib
from pathlib import Path

from lowlat.checkpoint.files import find_bytes
from lowlat.checkpoint.json_file import shown
from lowlat.errors import ConfigError
from lowlat.text.codec import MAX_TOKENIZER_BYTES, TextCodec

__all__ = ["check_tokens"]

FILE = "tokenizer.json"
MOST_PADDING = 1024  # the most rows by which vocabularies of the same tokens differ: they are padded to whole tiles
Side = tuple[Path | None, int]  # directory and vocab_size


def check_tokens(draft: Side, target: Side) -> None:
    """Raise ConfigError unless the same ids are the same tokens in both vocabularies.

    Tokens that were added to a tokenizer may differ: the target only rejects drafts that have one.
    """
    (directory, size), (target_directory, target_size) = draft, target
    if abs(size - target_size) > MOST_PADDING:
        raise ConfigError(
            f"{directory}: vocab_size {size} is not the target's {target_size}, nor within {MOST_PADDING} of it, as "
            "padding would be: method 'draft_model' needs a draft model of the target's vocabulary"
        )
    files = [None if each is None else find_bytes(each / FILE, MAX_TOKENIZER_BYTES) for each in (directory, target[0])]
    if directory is None or target_directory is None or None in files or _digest(files[0]) == _digest(files[1]):
        return
    own, other = _tokens(directory), _tokens(target_directory)
    different = [token for token, place in other.items() if own.get(token) != place]
    if different:
        first = min(different, key=other.__getitem__)
        found = f"is token {own[first]}" if first in own else "is no token"
        raise ConfigError(
            f"{directory / FILE}: {len(different)} of the target's {len(other)} tokens have other ids or none here, "
            f"first {shown(first)}, token {other[first]} of {target_directory / FILE}, which {found}: method "
            "'draft_model' needs a draft model of the target's vocabulary"
        )


def _digest(data: bytes | None) -> bytes:
    return hashlib.sha256(data or b"").digest()


def _tokens(directory: Path) -> dict[str, int]:
    codec = TextCodec.load(directory)
    if codec is None:
        raise ConfigError(f"{directory / FILE} is missing")
    try:
        return codec.ordinary_tokens
    finally:
        codec.close()
