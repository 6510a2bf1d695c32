"""Tokenizers, compilers and walks for tests of structured output."""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from lowlat.cli.options import bundled
from lowlat.options.request import SamplingParams
from lowlat.text import TextCodec
from lowlat.text.grammar.compiler import GrammarCompiler
from lowlat.text.grammar.state import GrammarState

__all__ = ["END", "HARMONY", "allowed", "codec_with", "compiler_of", "dumped", "mask_of", "state_of", "text_of", "walk"]

END = 0
PADDING = 29  # ids of a model's vocabulary beyond its tokenizer's
CLOSERS = ('"', "}", "]", '"}', '"]', '"],', '",', ",", "</")
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


@cache
def codec_with(*tokens: str, special: bool = False, templates: str = "") -> TextCodec:
    """The bundled tokenizer with further tokens."""
    tokenizer = Tokenizer.from_file(str(Path(bundled("target")) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens])
    return TextCodec(tokenizer, templates={"default": templates} if templates else None)


_COMPILERS: dict[TextCodec, GrammarCompiler] = {}


def compiler_of(codec: TextCodec) -> GrammarCompiler:
    """The one compiler of a codec: each has a process, which ends with the tests'."""
    if codec not in _COMPILERS:
        _COMPILERS[codec] = GrammarCompiler(codec, codec.vocab_size + PADDING, (END,))
    return _COMPILERS[codec]


def state_of(
    codec: TextCodec, prompt: str | Sequence[int] = "x", stop_ids: Sequence[int] = (END,), **options: Any
) -> GrammarState:
    """The state of a request with these sampling options."""
    ids = codec.encode(prompt, allow_special=True) if isinstance(prompt, str) else prompt
    state = compiler_of(codec).open(SamplingParams(**options), ids, stop_ids)
    assert state is not None
    return state


def mask_of(
    state: GrammarState, codec: TextCodec, tokens: Sequence[int] = (0,), parents: Sequence[int] = (-1,)
) -> np.ndarray:
    """Masks [T, words] of the rows, which were poisoned before."""
    masks = np.full((len(tokens), (codec.vocab_size + PADDING + 31) // 32), 0x5A5A5A5A, np.int32)
    state.fill(tokens, parents, masks)
    return masks


def allowed(row: np.ndarray) -> list[int]:
    """The tokens that a mask's row allows."""
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def dumped(value: object) -> str:
    """A document as the grammars of schemas have it."""
    return json.dumps(value, ensure_ascii=False)


@cache
def _closers(codec: TextCodec) -> frozenset[int]:
    return frozenset(ids[0] for text in CLOSERS if len(ids := codec.encode(text, add_special_tokens=False)) == 1)


def walk(state: GrammarState, codec: TextCodec, seed: int, max_tokens: int = 300) -> list[int] | None:
    """Tokens by chance through masks to the end, without it; None where it did not come.

    What closes texts and lists is taken often, and ever more so; drafts that fit are tried and taken back on the way.
    """
    chance = random.Random(seed)
    tokens: list[int] = []
    for place in range(max_tokens):
        may_follow = allowed(mask_of(state, codec)[0])
        assert may_follow, "no token may follow"
        if END in may_follow and (len(may_follow) == 1 or chance.random() < 0.5 + place / max_tokens):
            state.advance([END])
            return tokens
        closing = [token for token in may_follow if token in _closers(codec)]
        pool = closing if closing and chance.random() < 0.3 + place / max_tokens else may_follow
        token = chance.choice([token for token in pool if token != END] or may_follow)
        if place % 8 == 0:
            draft = [0, token, chance.choice(may_follow), chance.randrange(codec.vocab_size)]
            before = mask_of(state, codec, draft, (-1, 0, 0, 1))[0]
            assert allowed(before) == may_follow
        state.advance([token])
        tokens.append(token)
    return None


def text_of(codec: TextCodec, tokens: Sequence[int]) -> str:
    """The text of tokens that stand within a text."""
    return b"".join(map(codec.token_bytes, tokens)).decode()
