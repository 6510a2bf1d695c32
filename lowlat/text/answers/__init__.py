"""This package takes answers apart as they come: content, reasoning and tool calls, one module a format.

A format reads text, in which the tokens that mark its parts stand apart (`Marker`). Nothing that a model writes raises,
and how its text was cut into tokens changes nothing: what is not in the format is content.
"""

from lowlat.text.answers.offered import tools_of
from lowlat.text.answers.stream import AnswerDelta, AnswerStream

__all__ = ["AnswerDelta", "AnswerStream", "tools_of"]
