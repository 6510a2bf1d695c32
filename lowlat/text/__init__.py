"""Tokenizer, chat template, incremental detokeniser, stop strings. It knows neither models nor devices."""

from lowlat.text.codec import TextCodec
from lowlat.text.detokenizer import IncrementalDetokenizer, TextDelta
from lowlat.text.harmony import ChannelText, HarmonyParser, parse_channels

__all__ = [
    "ChannelText",
    "HarmonyParser",
    "IncrementalDetokenizer",
    "TextCodec",
    "TextDelta",
    "parse_channels",
]
