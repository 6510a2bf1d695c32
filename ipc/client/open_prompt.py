"""An open prompt is sent while it is being written; its answer can be read once it is finished."""

from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from lowlat.ipc.client.request import pieces_of
from lowlat.ipc.client.settings import deadline_of

if TYPE_CHECKING:
    from lowlat.ipc.client.asynchronous import AsyncGeneration
    from lowlat.ipc.client.blocking import Generation

__all__ = ["AsyncOpenPrompt", "OpenPrompt"]

Value = TypeVar("Value")


class OpenPrompt:
    """A request whose prompt is being written; see `Client.open_prompt`. One thread at a time writes it.

    Leaving its `with` before `finish`, or dropping it, abandons it.
    """

    def __init__(self, generation: "Generation") -> None:
        self._generation = generation
        self._finished = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'finished' if self._finished else 'being written'})"

    def append(self, piece: str | Sequence[int], *, timeout_s: float | None = None) -> None:
        """Send text or token ids; they are read at once, as far as their tokens are certain.

        Pieces of text that follow each other have the tokens of their whole, wherever they are cut. After a speculative
        `finish` it withdraws the answer that was begun.
        timeout_s  how long it may wait while the server takes no more (append_credit); then StreamError of the code
                   "timeout" is raised, and the prompt is abandoned
        Raises RequestError for what is neither, after `finish`, and for a prompt that the server has refused, such as
        one too long; Busy, StreamError, ServerGone as reading an answer does.
        """
        self._generation._append(pieces_of(piece), deadline_of(timeout_s))

    def finish(self, *, speculative: bool = False, timeout_s: float | None = None) -> "Generation":
        """End the prompt: the answer begins, and is read from what this returns.

        speculative  it may go on: nothing can be read until `finish` is called without it, and the next `append`
                     withdraws what was begun
        timeout_s    of the answer, as in `Client.generate`
        Raises what `append` does; an empty prompt is refused when its answer is read.
        """
        self._generation._finish(speculative=speculative, deadline=deadline_of(timeout_s))
        self._finished = not speculative
        return self._generation

    def cancel(self) -> None:
        """Abandon it; harmless when repeated."""
        self._generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self.cancel()


class AsyncOpenPrompt:
    """A request whose prompt is being written, for asyncio; see OpenPrompt. One task at a time writes it."""

    def __init__(self, generation: "AsyncGeneration") -> None:
        self._generation = generation
        self._finished = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'finished' if self._finished else 'being written'})"

    async def append(self, piece: str | Sequence[int], *, timeout_s: float | None = None) -> None:
        """Send text or token ids; see OpenPrompt.append."""
        await self._generation._append(pieces_of(piece), deadline_of(timeout_s))

    async def finish(self, *, speculative: bool = False, timeout_s: float | None = None) -> "AsyncGeneration":
        """End the prompt: the answer begins, and is read from what this returns; see OpenPrompt.finish."""
        await self._generation._finish(speculative=speculative, deadline=deadline_of(timeout_s))
        self._finished = not speculative
        return self._generation

    async def while_open(self, work: Awaitable[Value]) -> Value:
        """Wait for something while the prompt waits for it; it is cancelled where the request ends before.

        Raises why it has ended then, as `append` does.
        """
        return await self._generation._while_open(work)

    async def cancel(self) -> None:
        """Abandon it; harmless when repeated."""
        await self._generation.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            await self.cancel()
