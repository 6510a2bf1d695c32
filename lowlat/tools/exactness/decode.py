"""This module decodes a group of requests; meanwhile it may cancel some, or pause all."""

from collections.abc import Callable, Sequence

from lowlat.engine.runtime import Runtime
from lowlat.errors import LowlatError
from lowlat.options.keywords import NamedSession
from lowlat.options.request import TokenLogprobs
from lowlat.tools.exactness.report import SEPARATOR
from lowlat.tools.exactness.requests import Request

__all__ = ["Meddler", "cancelling", "decode", "pausing"]

CANCELLED_AFTER = 2  # tokens
# takes the runtime, the requests in order and the tokens of each live one; returns the requests that it cancelled
Meddler = Callable[[Runtime, Sequence[str], dict[str, list[int]]], set[str]]


def cancelling(runtime: Runtime, names: Sequence[str], live: dict[str, list[int]]) -> set[str]:
    """Cancel every other request after its second token."""
    due = {name for name in names[1::2] if len(live.get(name, ())) >= CANCELLED_AFTER}
    for name in due:
        runtime.cancel(name)
    return due


def pausing(runtime: Runtime, names: Sequence[str], live: dict[str, list[int]]) -> set[str]:
    """Pause all requests that have tokens, then resume them, so that each leaves its slot between two steps."""
    paused = [name for name in names if live.get(name) and runtime.pause(name)]
    for name in reversed(paused):  # with several slots each gets another one
        runtime.resume(name)
    return set()


def decode(
    runtime: Runtime,
    sweep: str,
    group: Sequence[Request],
    *,
    meddle: Meddler | None = None,
    session: NamedSession | None = None,
    logprobs: dict[str, list[TokenLogprobs]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Decode requests together; returns their answers by name, without cancelled ones.

    session   the session to which the requests belong
    logprobs  gets the logprobs of each answer that has them
    Raises LowlatError if one fails.
    """
    tokens = dict[str, list[int]]()
    for request in group:
        name = f"{sweep}{SEPARATOR}{request.name}"
        tokens[runtime.submit(request.prompt, request.params, request_id=name, session=session)] = []
    names, live, cancelled = list(tokens), dict(tokens), set[str]()
    while runtime.busy:
        for output in runtime.step():
            if output.error is not None:
                raise LowlatError(f"{output.request_id} failed: {output.error}")
            tokens[output.request_id] += output.token_ids
            if logprobs is not None and output.logprobs:
                logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            if output.finish_reason is not None:
                live.pop(output.request_id, None)
        if meddle is not None:
            for name in meddle(runtime, names, live):
                cancelled.add(name)
                live.pop(name, None)
    return {name: tuple(found) for name, found in tokens.items() if name not in cancelled}
