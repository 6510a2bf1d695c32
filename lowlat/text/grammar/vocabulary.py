"""This module gives the library of grammars a model's tokens; it alone imports that library."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowlat.errors import RequestError
from lowlat.text.codec import TextCodec

if TYPE_CHECKING:
    import llguidance

__all__ = ["LIMITS", "Vocabulary", "is_installed"]

TURN = 256  # tokens between two chances for other threads to run
# What a grammar may use of the library's own making, in parsing and in masks. Measured on an AMD EPYC: at 10,000 items
# a mask of the most ambiguous rules tried takes 0.3 s, at the library's 50,000 2 s; 20,000 states are some 30 MB.
LIMITS: dict[str, Any] = {"step_max_items": 10_000, "max_lexer_states": 20_000, "verbose_errors": False}


def is_installed() -> bool:
    """Whether the library is there: the extra `structured`."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


class Vocabulary:
    """The tokens of one model.

    vocab_size  of the model, which may be padded beyond its tokenizer
    end_id      an end token of the model, by which the library says that a grammar may end here
    tokens      bytes of each, b"" for one without text; special: ids that are no text
    Raises RequestError without the library.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: TextCodec, vocab_size: int, end_id: int) -> None:
        if not is_installed():
            raise RequestError("structured output needs the extra `structured`: pip install 'lowlat[structured]'")
        import llguidance

        self._codec = codec
        self.vocab_size = vocab_size
        self.eos_token_id = self.end_id = end_id
        added = codec.added_tokens()
        self.tokens: list[bytes] = []
        for token in range(vocab_size):
            if token % TURN == 0:
                time.sleep(0)
            self.tokens.append(codec.token_bytes(token))
        self.special_token_ids = [token for token in added if token < vocab_size]
        wrapper: Any = self
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=[end_id])
        self._limits = llguidance.LLParserLimits(**LIMITS)

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """The token ids of a text that a grammar forces; none where the tokenizer would change it."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        try:
            ids = self._codec.encode(text, add_special_tokens=False)
        except RequestError:
            return self._tokenizer.greedy_tokenize(text)
        if b"".join(self.tokens[token] for token in ids) != text.encode():
            return self._tokenizer.greedy_tokenize(text)
        return ids

    def is_no_text(self, token: int) -> bool:
        """Whether a token is special, or has no text."""
        return not self.tokens[token] or token in self.special_token_ids

    def matcher(self, grammar: str) -> "llguidance.LLMatcher":
        """A matcher at the beginning of a grammar in the library's text; the GIL is free meanwhile."""
        import llguidance

        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
