"""This module reads bodies of JSON lines while they are written: first a request, then pieces of its prompt.

    {"model": "...", "stream": true}      the request, as it is sent at once; its prompt, or a chat's last message, may
                                          hold a beginning
    "What people say "                    text, whose tokens are those of all text lines together
    [5, 6, 7]                             token ids; not of a chat
    {"finish": "speculative"}             the prompt may be complete: the answer begins; the next piece withdraws it

The end of the body is the end of the prompt. A body that breaks off cancels the request.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import groupby

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request

from lowlat.errors import StreamError
from lowlat.ipc.client import AsyncGeneration, AsyncOpenPrompt
from lowlat.serving.http.errors import ApiError, invalid
from lowlat.serving.http.streaming import BODY_TIMEOUT_S, CLIENT_GONE, MAX_BODY_BYTES, check_coding

__all__ = ["Lines", "feed", "is_lines"]

KINDS = ("application/x-ndjson", "application/jsonl", "application/ndjson")


class Trial(Struct, forbid_unknown_fields=True):
    """The line that ends a prompt on trial."""

    finish: str


Piece = str | list[int] | Trial
_HALF = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}"\s*$')  # half of a surrogate pair; JavaScript may cut strings there
_PIECE: msgspec.json.Decoder[Piece] = msgspec.json.Decoder(Piece)


def is_lines(request: Request) -> bool:
    """Whether a request's body has a line for each piece of its prompt."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in KINDS


class Lines:
    """Yields the lines of a request's body as they come, without empty ones. Raises ApiError for a compressed body."""

    def __init__(self, request: Request) -> None:
        check_coding(request)
        self._body: AsyncIterator[bytes] = aiter(request.stream())
        self._held = bytearray()
        self._num_bytes = 0
        self._lines: list[bytes] = []
        self._ended = False

    async def first(self) -> bytes:
        """Return the first line. Raises ApiError if it is too long, too slow, or missing."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not self._lines and not self._ended:
                    await self._receive()
        except TimeoutError:
            message = f"the first line of the body did not come within {BODY_TIMEOUT_S:g} s"
            raise ApiError(408, message, code="timeout") from None
        return self._lines.pop(0) if self._lines else b""

    async def more(self) -> list[bytes] | None:
        """Return the lines since the last call, at least one; None at the end. Raises ApiError for too long a body."""
        while not self._lines:
            if self._ended:
                return None
            await self._receive()
        lines, self._lines = self._lines, []
        return lines

    async def _receive(self) -> None:
        try:
            piece = await anext(self._body, None)
        except ClientDisconnect:
            raise ApiError(CLIENT_GONE, "the caller went away before the body had come", code="gone") from None
        if piece is None:
            self._ended = True
            whole = [bytes(self._held)]
        else:
            self._num_bytes += len(piece)
            if self._num_bytes > MAX_BODY_BYTES:
                raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="too_large")
            if b"\n" not in piece:
                self._held += piece
                return
            *whole, rest = (bytes(self._held) + piece).split(b"\n")
            self._held = bytearray(rest)
        self._lines += [line for line in whole if line.strip()]


async def feed(prompt: AsyncOpenPrompt, lines: Lines, beginning: str | Sequence[int] = "") -> AsyncGeneration:
    """Send a prompt's pieces as they come, finish it with the body's end, and return its answer.

    Raises ApiError for an invalid line, and the error that ends the request meanwhile, even while no line comes. The
    prompt is then abandoned.
    """
    place = 2
    try:
        async with prompt:
            await prompt.append(beginning)
            while (came := await prompt.while_open(lines.more())) is not None:
                for piece in _joined([_piece(line, place + n) for n, line in enumerate(came)]):
                    if isinstance(piece, Trial):
                        await prompt.finish(speculative=True)
                    else:
                        await prompt.append(piece)
                place += len(came)
            return await prompt.finish()
    except StreamError as error:
        if error.code != "deadline":
            raise
        raise ApiError(408, str(error), code="timeout") from None


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Join consecutive pieces of one kind, and drop an end on trial that more pieces follow.

    So many short lines become few messages; the server limits the number of messages a second.
    """
    last = len(pieces) - 1
    wanted = (each for place, each in enumerate(pieces) if place == last or not isinstance(each, Trial))
    for kind, alike in groupby(wanted, type):
        if kind is str:
            yield "".join(each for each in alike if isinstance(each, str))
        elif kind is list:
            yield [token for each in alike if isinstance(each, list) for token in each]
        else:
            yield from alike


def _piece(line: bytes, place: int) -> Piece:
    try:
        found = _PIECE.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = "it ends within a character" if _HALF.search(line) else f"{error!s:.200}"
        message = f"line {place} of the body: {why}; a piece is a string or a list of token ids"
        raise ApiError(400, message, param="prompt", code="json") from None
    if isinstance(found, Trial) and found.finish != "speculative":
        raise invalid("finish", f'line {place} of the body: finish is "speculative", or the end of the body')
    return found
