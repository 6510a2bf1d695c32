"""Tokenizer, chat template, incremental detokeniser, stop strings. It knows neither models nor devices."""

from lowlat.text.codec import TextCodec
from lowlat.text.detokenizer import IncrementalDetokenizer, TextDelta

__all__ = ["IncrementalDetokenizer", "TextCodec", "TextDelta"]
