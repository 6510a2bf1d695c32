"""A token stream decodes token ids one by one: each token yields the text that is certain after it.

The joined text equals decoding all ids at once, because a stream cuts the ids only where the tokenizer's decoder
provably does not look across the cut. Two kinds of decoder allow that:

- `ByteLevel` (GPT-2, Llama 3, Qwen, gpt-oss): every token is a string of bytes, whatever its neighbours.
- chains of decoders that work token by token (`Replace`, `Metaspace`, `WordPiece`, `Strip`), `ByteFallback`, which
  joins runs of byte tokens, and a last `Fuse` and `Strip` at the left (Llama 2, Gemma, Mistral, BERT).

`tokenizers`' own DecodeStream does not guarantee that. It outputs a byte-fallback character before the run of bytes has
ended, although a later byte may turn it into U+FFFD; if that happens, it raises.

Other decoders (`BPEDecoder`, `CTC`) change the text of a token when the next one arrives; they are refused at
load.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

from lowlat.errors import ConfigError, RequestError
from lowlat.text.faults import library_failures

__all__ = ["ByteStream", "ChainStream", "Streams", "TokenStream", "byte_alphabet"]

LOCAL_DECODERS = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})
BYTE_TOKEN = re.compile(r"<0x..>", re.DOTALL)
FIRST_TOKENS = 16  # of a prefix, decoded first to see whether it has any text; tokens without text are rare


class TokenStream(Protocol):
    """Turns one request's token ids into text."""

    @property
    def num_held(self) -> int:
        """The number of characters held back, if no token followed."""

    def prime(self, prefix_ids: Sequence[int]) -> None:
        """Take the tokens before the first one; their text is not output."""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is certain after it."""

    def finish(self) -> str:
        """Return the text still held back."""


class Streams:
    """Has what all streams of one tokenizer share: the kind of its decoder, and its tokens' spellings.

    Raises ConfigError when the decoder cannot be streamed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._spellings: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}
        steps = _decoder_steps(tokenizer)
        kinds = [str(step.get("type")) for step in steps]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self.anchor: int | None = None
        self.anchor_text = ""
        if self.byte_level:
            if [kind for kind in kinds if kind != "Fuse"] != ["ByteLevel"]:
                raise ConfigError(f"its decoder {' + '.join(kinds)} cannot be decoded token by token")
            self._byte_of = byte_alphabet()
        else:
            _check_chain(steps, kinds)
            self._find_anchor()

    def open(self, *, skip_special_tokens: bool) -> TokenStream:
        """Start the text of one request."""
        if self.byte_level:
            return ByteStream(self, skip_special_tokens)
        return ChainStream(self, skip_special_tokens)

    def spelling(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return a token as the vocabulary writes it; None for one that decoding leaves out."""
        if token_id not in self._spellings:
            self._spellings[token_id] = self.tokenizer.id_to_token(token_id)
        spelling = self._spellings[token_id]
        if skip_special_tokens and spelling in self.special:
            return None
        return spelling

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Return a byte-level token's bytes; a token not in the alphabet stands for itself, as UTF-8."""
        spelling = self.spelling(token_id, skip_special_tokens)
        if spelling is None:
            return b""
        if token_id not in self._bytes:
            values = [self._byte_of.get(character) for character in spelling]
            known = [value for value in values if value is not None]
            whole = len(known) == len(values)
            self._bytes[token_id] = bytes(known) if whole else spelling.encode("utf-8")
        return self._bytes[token_id]

    def bytes_within(self, token_id: int) -> bytes:
        """Return the bytes of a token of any kind, special ones included, as it reads after other text."""
        if self.byte_level:
            return self.token_bytes(token_id, False)
        spelling = self.spelling(token_id, False)
        if spelling is None:
            return b""
        if self.byte_fallback and BYTE_TOKEN.fullmatch(spelling):
            try:
                return bytes((int(spelling[3:5], 16),))
            except ValueError:
                pass  # not two hexadecimal digits: text like any other
        try:
            return self.decode_inner([token_id]).encode("utf-8")
        except RequestError:  # the library fails on it
            return spelling.encode("utf-8")

    def decode(self, ids: list[int]) -> str:
        """Decode ids, special ones included. Raises RequestError if the library fails on them."""
        with library_failures("decode an answer"):
            return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decode_inner(self, ids: list[int]) -> str:
        """Decode ids as the continuation of a text: the anchor is decoded before them, and cut off."""
        if self.anchor is None:
            return self.decode(ids)
        return self.decode([self.anchor, *ids])[len(self.anchor_text) :]

    def _find_anchor(self) -> None:
        """Choose a plain token whose text does not depend on what follows; it replaces all earlier tokens."""
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        candidates = [self.tokenizer.token_to_id(letter) for letter in letters]
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        candidates += [index for token, index in vocabulary.items() if token.isascii() and token.isalnum()]
        for candidate in candidates:
            if candidate is None or self.spelling(candidate, True) is None:
                continue
            text = self.decode([candidate])
            if text and text.isalnum() and self.decode([candidate, candidate]).startswith(text):
                self.anchor, self.anchor_text = candidate, text
                return
        raise ConfigError("its vocabulary has no plain token of letters or digits, which decoding needs")


class ByteStream:
    """The stream of a byte-level tokenizer: each token's bytes go through an incremental UTF-8 decoder."""

    def __init__(self, streams: Streams, skip_special_tokens: bool) -> None:
        self._streams = streams
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def num_held(self) -> int:
        """See TokenStream: one for an incomplete character."""
        return 1 if self._decoder.getstate()[0] else 0

    def prime(self, prefix_ids: Sequence[int]) -> None:
        """Keep a character that the prefix leaves incomplete: at most its last three bytes."""
        tail = b""
        for token_id in reversed(prefix_ids):
            tail = self._streams.token_bytes(token_id, self._skip) + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)

    def push(self, token_id: int) -> str:
        """Return the characters that the token completes."""
        return self._decoder.decode(self._streams.token_bytes(token_id, self._skip))

    def finish(self) -> str:
        """Return U+FFFD for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class ChainStream:
    """The stream of decoders that work token by token.

    A run of byte tokens is held until a token of another kind ends it: an invalid byte anywhere in the run turns all of
    it into U+FFFD, so no part of it is certain before. The first tokens are decoded together until they give text,
    since the start of the text is stripped. Later tokens are decoded after the anchor.
    """

    def __init__(self, streams: Streams, skip_special_tokens: bool) -> None:
        self._streams = streams
        self._skip = skip_special_tokens
        self._pending: list[int] = []
        self._first = True

    @property
    def num_held(self) -> int:
        """See TokenStream."""
        return len(self._pending_text())

    def prime(self, prefix_ids: Sequence[int]) -> None:
        """Check whether the prefix has text, and keep the run of byte tokens at its end."""
        streams = self._streams
        kept = [token for token in prefix_ids if streams.spelling(token, self._skip) is not None]
        end = len(kept)
        while end and self._is_byte(kept[end - 1]):
            end -= 1
        self._first = not (streams.decode(kept[: min(end, FIRST_TOKENS)]) or streams.decode(kept[:end]))
        self._pending = kept if self._first else kept[end:]

    def push(self, token_id: int) -> str:
        """Return the text of the held bytes and of the token; "" while the run of bytes goes on."""
        if self._streams.spelling(token_id, self._skip) is None:
            return ""
        self._pending.append(token_id)
        return "" if self._is_byte(token_id) else self._flush()

    def finish(self) -> str:
        """Return the text of the bytes held back."""
        return self._flush()

    def _flush(self) -> str:
        text = self._pending_text()
        if self._first and not text:
            return ""
        self._first = False
        self._pending = []
        return text

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return self._streams.decode(self._pending) if self._first else self._streams.decode_inner(self._pending)

    def _is_byte(self, token_id: int) -> bool:
        spelling = self._streams.spelling(token_id, self._skip)
        is_byte = spelling is not None and BYTE_TOKEN.fullmatch(spelling) is not None
        return is_byte and self._streams.byte_fallback


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder as a flat list of its parts, as tokenizer.json describes them."""
    if tokenizer.decoder is None:
        return []
    stack: list[Any] = [json.loads(tokenizer.decoder.__getstate__())]
    steps = []
    while stack:
        step = stack.pop()
        if step.get("type") == "Sequence":
            stack.extend(reversed(step["decoders"]))
        else:
            steps.append(step)
    return steps


def _check_chain(steps: list[dict[str, Any]], kinds: list[str]) -> None:
    """Raise ConfigError for a decoder with a part that looks at several tokens, except those that streams handle."""
    name = " + ".join(kinds)
    fused = False
    for step, kind in zip(steps, kinds, strict=True):
        if kind not in LOCAL_DECODERS:
            raise ConfigError(f"its decoder {name} cannot be decoded token by token: {kind} looks ahead")
        if fused and kind != "Fuse" and (kind != "Strip" or step.get("stop", 0)):
            raise ConfigError(f"its decoder {name} cannot be decoded token by token: {kind} follows Fuse")
        fused = fused or kind == "Fuse"


def byte_alphabet() -> dict[str, int]:
    """Return which byte each character of a byte-level token stands for.

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in
    order. Source: "Language Models are Unsupervised Multitask Learners", GPT-2's byte-level BPE.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
