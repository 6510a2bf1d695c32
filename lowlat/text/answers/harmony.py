"""This module finds the parts of an answer in Harmony's channels: analysis is reasoning, and messages are calls."""

from collections.abc import Sequence

from lowlat.text.answers.base import Calls, Parts, Tools
from lowlat.text.harmony import ChannelDelta, HarmonyReader

__all__ = ["HarmonyAnswer"]

FUNCTIONS = "functions."


class HarmonyAnswer:
    """One answer.

    tools  the functions; messages to them, and to any function, are calls. None: they are reasoning, as those to the
           model's own tools are
    begun  the header of a message that the prompt leaves open, with which the answer goes on; empty: its role alone
    """

    def __init__(self, *, tools: Tools | None, begun: Sequence[str] = ()) -> None:
        self._tools = tools
        self._reader = HarmonyReader()
        self._reader.push(begun)
        self._calls = Calls()
        self._message = -1  # the one that the last call is
        self._empty = False  # whether that one has no text so far

    @property
    def thinking(self) -> bool:
        """See `AnswerFormat`."""
        channel, recipient = self._reader.current
        return self._is_reasoning(channel, recipient)

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._add(self._reader.push(pieces), parts)

    def finish(self, parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._add(self._reader.finish(), parts)
        messages = self._reader.messages
        if messages and messages[-1].complete:
            self._end_call(parts)

    def _add(self, deltas: Sequence[ChannelDelta], parts: Parts) -> None:
        for delta in deltas:
            name = self._function(delta.recipient)
            if delta.message != self._message:
                self._end_call(parts)
            if name:
                if delta.message != self._message:
                    self._message, self._empty = delta.message, True
                    self._calls.begin(name, parts)
                self._empty = self._empty and not delta.text
                self._calls.arguments(delta.text, parts)
            elif self._is_reasoning(delta.channel, delta.recipient):
                parts.reasoning += delta.text
            else:
                parts.content += delta.text

    def _is_reasoning(self, channel: str | None, recipient: str | None) -> bool:
        return not self._function(recipient) and (channel == "analysis" or bool(recipient))

    def _function(self, recipient: str | None) -> str:
        """The function to which a message is; "" where it is a call to none."""
        if self._tools is None or recipient is None:
            return ""
        if recipient.startswith(FUNCTIONS):
            return recipient[len(FUNCTIONS) :]
        return recipient if recipient in self._tools.functions else ""

    def _end_call(self, parts: Parts) -> None:
        """A call whose message had no text has no arguments."""
        if self._empty:
            self._calls.arguments("{}", parts)
        self._empty = False
