"""This package has the tokenizer, the chat template, the detokeniser, stop strings and parsed answers."""

from lowlat.text.answers import AnswerDelta, AnswerStream, tools_of
from lowlat.text.codec import TextCodec
from lowlat.text.detokenizer import IncrementalDetokenizer, TextDelta
from lowlat.text.harmony import ChannelText, HarmonyParser, parse_channels

__all__ = [
    "AnswerDelta",
    "AnswerStream",
    "ChannelText",
    "HarmonyParser",
    "IncrementalDetokenizer",
    "TextCodec",
    "TextDelta",
    "parse_channels",
    "tools_of",
]
