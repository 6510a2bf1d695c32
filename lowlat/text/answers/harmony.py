"""Harmony's channels as the parts of an answer: analysis is reasoning, a message to a function is a call."""

from collections.abc import Sequence

from lowlat.text.answers.base import Calls, Parts
from lowlat.text.harmony import ChannelDelta, HarmonyReader

__all__ = ["HarmonyAnswer"]

FUNCTIONS = "functions."


class HarmonyAnswer:
    """One answer.

    tools  whether messages to functions are calls; else they are reasoning, as those to the model's own tools are
    """

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._reader = HarmonyReader()
        self._calls = Calls()
        self._message = -1  # the one that the last call is

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._add(self._reader.push(pieces), parts)

    def finish(self, parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._add(self._reader.finish(), parts)

    def _add(self, deltas: Sequence[ChannelDelta], parts: Parts) -> None:
        for delta in deltas:
            recipient = delta.recipient or ""
            if self._tools and recipient.startswith(FUNCTIONS):
                if delta.message != self._message:
                    self._message = delta.message
                    self._calls.begin(recipient[len(FUNCTIONS) :], parts)
                self._calls.arguments(delta.text, parts)
            elif delta.channel == "analysis" or recipient:
                parts.reasoning += delta.text
            else:
                parts.content += delta.text
