"""An open prompt is sent while it is being written; its answer can be read after `finish`."""

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
    """A request whose prompt is being written; see `Client.open_prompt`. One thread at a time may write it.

    Leaving its `with` before `finish`, or dropping it, abandons the prompt.
    """

    def __init__(self, generation: "Generation") -> None:
        self._generation = generation
        self._finished = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'finished' if self._finished else 'being written'})"

    def append(self, piece: str | Sequence[int], *, timeout_s: float | None = None) -> None:
        """Send text or token ids; the server reads them at once, as far as later pieces cannot change their tokens.

        Consecutive pieces of text are tokenized as one text, however it is split. After a speculative `finish` this
        withdraws the answer that was begun.
        timeout_s  how long to wait while the server takes no more (append_credit); after it StreamError with the code
                   "timeout" is raised, and the prompt is abandoned
        Raises RequestError for a piece of another type, after `finish`, and for a prompt that the server has refused,
        such as one that is too long; Busy, StreamError and ServerGone as reading an answer does.
        """
        self._generation._append(pieces_of(piece), deadline_of(timeout_s))

    def finish(self, *, speculative: bool = False, timeout_s: float | None = None) -> "Generation":
        """End the prompt, so that the answer begins; read it from the returned Generation.

        speculative  the prompt may continue: nothing can be read until `finish` is called without it, and the next
                     `append` withdraws the answer
        timeout_s    timeout of the answer, as in `Client.generate`
        Raises what `append` does. An empty prompt is refused when its answer is read.
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
        """End the prompt, so that the answer begins; see OpenPrompt.finish."""
        await self._generation._finish(speculative=speculative, deadline=deadline_of(timeout_s))
        self._finished = not speculative
        return self._generation

    async def while_open(self, work: Awaitable[Value]) -> Value:
        """Wait for the next input of the prompt; if the request ends first, cancel `work`.

        Then raises why the request has ended, as `append` does.
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
