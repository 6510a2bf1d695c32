"""This module shows the channels of an answer in Harmony on a terminal: the final one plain, the others dim.

A pipe or file gets only the answer: the final channel, and text that is in no channel.
"""

import sys
from dataclasses import asdict
from typing import Any

from lowlat.cli.console import stream_text
from lowlat.ipc.chunk import Chunk
from lowlat.text import HarmonyParser, TextCodec, parse_channels
from lowlat.text.harmony import ChannelDelta

__all__ = ["ChannelWriter", "channel_dicts"]

ANSWERS = ("final", None)


class ChannelWriter:
    """Streams one answer; `answered` says whether it has had text of the final channel, or of none."""

    def __init__(self, codec: TextCodec) -> None:
        self._parser = HarmonyParser(codec)
        self._message: int | None = None
        self.answered = False

    def __call__(self, chunk: Chunk) -> None:
        """Write what came."""
        deltas = self._parser.push(chunk.token_ids)
        if chunk.finish_reason is not None:
            deltas += self._parser.finish()
        for delta in deltas:
            self._write(delta)

    def _write(self, delta: ChannelDelta) -> None:
        answers = delta.channel in ANSWERS
        self.answered = self.answered or answers
        if not answers and not sys.stdout.isatty():
            return
        if self._message not in (None, delta.message):
            stream_text("\n\n" if sys.stdout.isatty() else "\n")
        self._message = delta.message
        if answers:
            stream_text(delta.text)
        else:
            stream_text(delta.text, dim=True)


def channel_dicts(codec: TextCodec | None, token_ids: list[int]) -> list[dict[str, Any]] | None:
    """Return an answer's messages as JSON values; None if the model does not use Harmony."""
    messages = parse_channels(codec, token_ids)
    if messages is None:
        return None
    return [asdict(message) for message in messages]
