"""An open prompt is prefilled while it is still being written: `append` adds text or token ids, `finish` ends it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowlat.errors import RequestError
from lowlat.text.growing import GrowingPrompt

if TYPE_CHECKING:
    from lowlat.engine.stepped import SteppedRuntime

__all__ = ["OpenPrompt"]


class OpenPrompt:
    """A request whose prompt is being written; see `Runtime.open_prompt`. One thread writes it."""

    def __init__(self, runtime: "SteppedRuntime", request_id: str, *, max_tokens: int, allow_special: bool) -> None:
        self._runtime = runtime
        self._pieces = GrowingPrompt(
            runtime.codec,
            max_context=runtime.config.max_context,
            max_tokens=max_tokens,
            allow_special=allow_special,
        )
        self._refusal = ""  # why a piece was refused: the prompt lacks it, and cannot be used
        self.request_id = request_id

    def append(self, piece: Sequence[int] | str) -> None:
        """Add text or token ids; complete chunks are prefilled immediately.

        After a speculative `finish` it withdraws the answer, and prefill goes on after the last certain chunk.
        Raises RequestError for other types, a prompt too long for the context with max_tokens, and after `finish`.
        """
        self._check()
        ids = self._pieces.append(piece if isinstance(piece, str) else self._runtime.checks.prompt_ids(piece))
        try:
            self._runtime.grow_prompt(self.request_id, ids)
        except RequestError as error:
            self._refusal = str(error)
            raise

    def finish(self, *, speculative: bool = False) -> None:
        """End the prompt: the answer begins.

        speculative  whether the prompt may go on: the answer's outputs are held back until `finish` is called without
                     it; the next `append` drops them
        Raises RequestError for an empty prompt, and after `finish`.
        """
        self._check()
        self._runtime.finish_prompt(self.request_id, self._pieces.rest(), speculative=speculative)

    def _check(self) -> None:
        if self._refusal:
            raise RequestError(f"a part of the prompt was refused: {self._refusal}")

    def cancel(self) -> None:
        """End the request; its last output says "cancelled". Raises RequestError if it has ended."""
        self._runtime.cancel(self.request_id)
