"""This module encodes texts that spell special tokens: in callers' strings these stay text, in templates not.

A second tokenizer shares all parts of the model's except the added tokens. In it special tokens are spelled by
placeholders that nobody can guess. So no caller's text becomes a special token, and normalizer, pre-tokenizer and
merges treat it like any text.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from lowlat.errors import ConfigError, RequestError
from lowlat.text.faults import library_failures

__all__ = ["LiteralTokenizer"]

MAX_FILLERS = 1 << 20  # ids without a token that a vocabulary may have
MARKS = "\ufdd0-\ufdef"  # noncharacters: without meaning in any text, by the Unicode standard


class LiteralTokenizer:
    """Encodes text in which a special token's spelling is text.

    tokenizer   the model's; this one shares its model, normalizer, pre-tokenizer and post-processor
    Raises ConfigError for a vocabulary whose ids have too many holes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        known = tokenizer.get_vocab(with_added_tokens=True)
        key = secrets.token_hex(8)
        self._special = {token.content: number for number, token in added.items() if token.special}
        self._placeholders = {
            content: f"\U0001fffe{key}{number}\U0001ffff" for content, number in self._special.items()
        }
        self._tokenizer = _shared(tokenizer)
        self._first = max(known.values(), default=0) + 1
        num_fillers = self._first - self._tokenizer.get_vocab_size(with_added_tokens=False)
        if num_fillers > MAX_FILLERS:
            raise ConfigError(f"its vocabulary has {num_fillers} ids without a token; at most {MAX_FILLERS}")
        # Added tokens get new ids above the vocabulary, so that an id shows whether an added token made it.
        self._tokenizer.add_tokens([AddedToken(f"{key}{place}", normalized=False) for place in range(num_fillers)])
        contents = {number: self._placeholders.get(token.content, token.content) for number, token in added.items()}
        self._tokenizer.add_tokens([_like(token, contents[number]) for number, token in added.items()])
        self._ids = {self._tokenizer.token_to_id(content): number for number, content in contents.items()}
        spellings = sorted(self._special, key=len, reverse=True)
        spelled_out = "|".join(map(re.escape, spellings)) or "(?!)"
        self._spelled = re.compile(spelled_out)
        self._perhaps_marked = re.compile(f"([{MARKS}]?)({spelled_out})")
        self._unspeakable = self._find_unspeakable(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Encode a text without holding the GIL; `ids` returns the encoding's token ids."""
        # not `encode`, which keeps the GIL: other threads would wait 50 ms for 100,000 characters
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def ids(self, encoding: Encoding) -> list[int]:
        """Return the token ids of an encoded text, by the numbers of the model's tokenizer."""
        ids: list[int] = encoding.ids
        if ids and max(ids) >= self._first:
            ids = [self._ids.get(number, number) for number in ids]
        return ids

    def check(self, text: str) -> None:
        """Raise RequestError for a special token's spelling that the tokenizer cannot encode as plain text."""
        for content in self._unspeakable:
            if content in text:
                raise RequestError(
                    f"the text spells the special token {content!r:.80}, which this tokenizer cannot write as text; "
                    "allow_special takes it as the token"
                )

    def marked(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Mark every special token that the strings of JSON values spell; returns the values, and the mark or "".

        Raises RequestError if all characters that could be marks are in use, or values are nested too deep.
        """
        strings: list[str] = []
        try:
            _gather(values, strings)
            if not any(map(self._spelled.search, strings)):
                return dict(values), ""
            used = set().union(*strings)
            mark = next((mark for mark in map(chr, range(ord(MARKS[0]), ord(MARKS[-1]) + 1)) if mark not in used), "")
            if not mark:
                raise RequestError("messages hold every character from U+FDD0 to U+FDEF, and special tokens' spellings")
            return _mapped(values, lambda text: self._spelled.sub(lambda match: mark + match[0], text)), mark
        except RecursionError:
            raise RequestError("messages and template variables are nested too deep") from None

    def template_tokens(self, text: str, mark: str) -> tuple[str, str]:
        """Return a rendered text without marks, and the same with placeholders for the unmarked special tokens."""

        def replaced(match: re.Match[str]) -> str:
            before, spelled = match[1], match[2]
            return spelled if mark and before == mark else before + self._placeholders[spelled]

        with_placeholders = self._perhaps_marked.sub(replaced, text)
        if mark:  # marks without a special token after them remain if the template has cut the text
            return text.replace(mark, ""), with_placeholders.replace(mark, "")
        return text, with_placeholders

    def _find_unspeakable(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """Find special tokens that the model produces even from their plain spelling, as models of whole words do.

        The unknown token is left out. Tokens on whose spelling the library fails are included.
        """
        unknown = getattr(tokenizer.model, "unk_token", None)
        found = []
        for content, number in self._special.items():
            try:
                with library_failures("encode a special token's spelling"):
                    ids = self.ids(self.encode(content, add_special_tokens=False))
            except RequestError:
                ids = [number]
            if content != unknown and number in ids:
                found.append(content)
        return tuple(found)


def _shared(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer of the same parts, without copies, and without added tokens."""
    made = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        value = getattr(tokenizer, part)
        if value is not None:
            setattr(made, part, value)
    return made


def _like(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
    )


def _gather(value: Any, strings: list[str]) -> None:
    if isinstance(value, str):
        strings.append(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _gather(key, strings)
            _gather(item, strings)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _gather(item, strings)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value
