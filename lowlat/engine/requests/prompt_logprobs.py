"""This module collects the logprobs of a prompt, chunk by chunk, until its request's first output takes them."""

from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.text import TextCodec

__all__ = ["PromptLogprobsSoFar"]


class PromptLogprobsSoFar:
    """Collects the logprobs of one prompt's tokens.

    codec  gives the tokens' texts; None: they have none
    """

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec
        self._parts: list[PromptLogprobs] = []
        self._texts: dict[int, bytes] = {}

    def add(self, part: PromptLogprobs, first_token: int) -> None:
        """Add the next tokens' logprobs. The prompt's first token has no logprob."""
        if not self._parts:
            self._parts.append(PromptLogprobs.first(first_token, part.num_top))
        self._parts.append(part)
        if self._codec is not None:
            new = (part.tokens() | {first_token}) - self._texts.keys()
            self._texts.update((token, self._codec.token_bytes(token)) for token in new)

    def clear(self) -> None:
        """Drop them, since the prompt is prefilled again."""
        self._parts.clear()

    def take(self) -> PromptLogprobs | None:
        """Take all of them; None if there are none."""
        parts, self._parts = self._parts, []
        return PromptLogprobs.joined(parts, None if self._codec is None else self._texts) if parts else None
