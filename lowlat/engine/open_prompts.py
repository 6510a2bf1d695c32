"""Prompts that are read while they are still being written: text or token ids come, and the last call finishes them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowlat.errors import RequestError
from lowlat.text.growing import GrowingText

if TYPE_CHECKING:
    from lowlat.engine.runtime import Runtime

__all__ = ["GrowingPrompt", "OpenPrompt"]


class GrowingPrompt:
    """The token ids of a prompt's pieces: `append` gives those that are certain now, `rest` those that an end adds.

    Pieces of text that follow each other have the tokens of their whole. Token ids between them are the caller's own
    borders: text before and after them is encoded by itself. What the tokenizer puts around a text stands there where
    the prompt is text alone.
    """

    def __init__(self, runtime: "Runtime", *, allow_special: bool) -> None:
        self._codec, self._checks = runtime.codec, runtime.checks
        self._max_context, self._allow_special = runtime.config.max_context, allow_special
        self._text: GrowingText | None = None
        self._has_ids = False

    def append(self, piece: Sequence[int] | str) -> list[int]:
        """Take text or token ids. Raises RequestError for what is neither, and then takes nothing."""
        if isinstance(piece, str):
            if self._text is None:
                self._text = self._open()
            return self._text.append(piece)
        ids = list(self._checks.prompt_ids(piece))
        found = self.rest() if self._text is not None else []
        self._text, self._has_ids = None, True
        return found + ids

    def rest(self) -> list[int]:
        """The token ids of what is held back, if the prompt ends here."""
        return [] if self._text is None else self._text.rest()

    def _open(self) -> GrowingText:
        codec = self._codec
        if codec is None:
            raise RequestError("a text prompt needs tokenizer.json in the model directory; give token ids")

        def encode(text: str, around: bool) -> list[int]:
            return codec.encode(
                text, add_special_tokens=around, allow_special=self._allow_special, max_context=self._max_context
            )

        return GrowingText(codec.cuts, encode, is_start=not self._has_ids)


class OpenPrompt:
    """A request whose prompt is being written; see `Runtime.open_prompt`. One thread writes it."""

    def __init__(self, runtime: "Runtime", request_id: str, *, allow_special: bool) -> None:
        self._runtime = runtime
        self._pieces = GrowingPrompt(runtime, allow_special=allow_special)
        self._refusal = ""  # of a piece: the prompt lacks it, and is of no more use
        self.request_id = request_id

    def append(self, piece: Sequence[int] | str) -> None:
        """Add text or token ids, of which whole chunks are read at once.

        After a speculative `finish` it withdraws what was begun: reading goes on from the chunks that are certain.
        Raises RequestError for what is neither, a prompt too long for the context with max_tokens, and after `finish`.
        """
        self._check()
        ids = self._pieces.append(piece)
        try:
            self._runtime.grow_prompt(self.request_id, ids)
        except RequestError as error:
            self._refusal = str(error)
            raise

    def finish(self, *, speculative: bool = False) -> None:
        """End the prompt: the answer begins.

        speculative  it may go on: the answer's outputs are kept back until `finish` is called without it, and are
                     dropped by the next `append`
        Raises RequestError for an empty prompt, and after `finish`.
        """
        self._check()
        self._runtime.finish_prompt(self.request_id, self._pieces.rest(), speculative=speculative)

    def _check(self) -> None:
        if self._refusal:
            raise RequestError(f"a part of the prompt was refused: {self._refusal}")

    def cancel(self) -> None:
        """End the request; its last output says "cancelled". Raises RequestError where it has ended."""
        self._runtime.cancel(self.request_id)
