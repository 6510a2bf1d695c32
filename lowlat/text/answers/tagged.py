"""This module reads answers whose parts are marked by tags: a thought, then content and tool calls.

A tag is text, whether the tokenizer has a token for it or not. White space next to tags belongs to no part. How calls
are marked a `CallSyntax` says.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from lowlat.text.answers.base import CallBody, Calls, Parts, Tools, TrimmedText, held_suffix
from lowlat.text.answers.syntax import CallSyntax
from lowlat.text.templates.tags import END_THOUGHT, THOUGHT

__all__ = ["THOUGHTS", "TaggedAnswer", "ThoughtTags"]

SEPARATORS = " \t\r\n;,"  # between calls without tags
SHOWN = 2  # characters at an answer's end that are no tag yet


class ThoughtTags(NamedTuple):
    """The tags around a thought. label: what stands after the first, and is no thought."""

    opening: str
    closing: str
    label: str = ""


THOUGHTS = (
    ThoughtTags(THOUGHT, END_THOUGHT),
    ThoughtTags("[THINK]", "[/THINK]"),
    ThoughtTags("<seed:think>", "</seed:think>"),
    ThoughtTags("<|channel>", "<channel|>", "thought"),
)


class TaggedAnswer:
    """One answer.

    thought   the tags of a thought; None for a model that has none
    thinking  whether the prompt leaves a thought open, with which the answer goes on
    thought_begun  whether the prompt has text of that thought
    syntax    of calls; None: no calls are looked for
    tools     the functions
    silent    tags that are special tokens: where one begins no call it is no text
    """

    def __init__(
        self,
        *,
        thought: ThoughtTags | None = THOUGHTS[0],
        thinking: bool = False,
        thought_begun: bool = False,
        syntax: CallSyntax | None = None,
        tools: Tools | None = None,
        silent: Collection[str] = (),
    ) -> None:
        self._tags = thought
        self._syntax = syntax
        self._tools = tools or Tools()
        self._silent = silent
        self._held = ""
        self._calls = Calls(short=syntax is not None and syntax.short)
        self._thought = TrimmedText(leading=thought_begun)
        self._content = TrimmedText(leading=True)
        self._called = False
        self._call: CallBody | None = None
        self._is_bare = False
        opened = self._in_thought if thought_begun else self._at_label
        self._step = opened if thinking else self._at_begin

    @property
    def thinking(self) -> bool:
        """See `AnswerFormat`."""
        return self._step in (self._at_label, self._in_thought)

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._held += "".join(pieces)
        while self._held and self._step(parts):
            pass

    def finish(self, parts: Parts) -> None:
        """See `AnswerFormat`. A call that has not begun, and a tag that is cut, are no text."""
        if self._step == self._in_thought:
            parts.reasoning += self._thought.push(self._without_cut_tag(self._held, self._closing))
        elif self._step == self._in_call:
            if self._call is not None and self._is_bare and not self._tools.required:
                self._show(self._call.raw + self._held, parts)
            self._called = self._called or not self._is_bare
        elif self._step != self._after_call and not self._tools.required:
            if self._called and self._step == self._at_content:
                self._held = self._held.lstrip(SEPARATORS)
            openings = () if self._syntax is None else tuple(self._syntax.openings)
            shown = self._without_cut_tag(self._held, *openings)
            self._show(shown, parts)
            self._called = self._called or shown != self._held
        self._held = ""
        if not self._called:
            parts.content += self._content.finish()

    @property
    def _closing(self) -> str:
        return "" if self._tags is None else self._tags.closing

    def _without_cut_tag(self, text: str, *tags: str) -> str:
        keep = held_suffix(text, *tags)
        return text if keep <= SHOWN else text[: len(text) - keep]

    def _show(self, text: str, parts: Parts) -> None:
        parts.content += self._content.push(text)

    # A step takes from what is held, and returns whether there is more to do.

    def _at_begin(self, parts: Parts) -> bool:
        """A thought opens the answer, or there is none."""
        text = self._held.lstrip()
        tag = "" if self._tags is None else self._tags.opening
        if tag and text.startswith(tag):
            self._held = text[len(tag) :]
            self._step = self._at_label
        elif tag.startswith(text) and tag:
            return False
        else:
            self._step = self._at_content
        return True

    def _at_label(self, parts: Parts) -> bool:
        label = "" if self._tags is None else self._tags.label
        if label.startswith(self._held) and self._held != label:
            return False
        self._held = self._held.removeprefix(label)
        self._step = self._in_thought
        return True

    def _in_thought(self, parts: Parts) -> bool:
        text, tag, rest = self._held.partition(self._closing)
        if tag:
            parts.reasoning += self._thought.push(text)
            self._held = rest
            self._content = TrimmedText()
            self._step = self._at_content
            return True
        keep = held_suffix(text, self._closing)
        parts.reasoning += self._thought.push(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return False

    def _at_content(self, parts: Parts) -> bool:
        """The place where a call may begin without a tag."""
        bare = None if self._syntax is None else self._syntax.bare
        text = self._held.lstrip(SEPARATORS if self._called else None)
        if not bare:
            self._step = self._in_content
        elif not text:
            return False
        elif text[0] in bare:
            self._begin_call(bare[text[0]](self._held[: len(self._held) - len(text)], self._tools), text, bare=True)
        else:
            self._step = self._in_content
        return True

    def _in_content(self, parts: Parts) -> bool:
        openings = {} if self._syntax is None else self._syntax.openings
        places = [(place, tag) for tag in openings if (place := self._held.find(tag)) >= 0]
        if not places:
            keep = held_suffix(self._held, *openings)
            self._show(self._held[: len(self._held) - keep], parts)
            self._held = self._held[len(self._held) - keep :]
            return False
        place, tag = min(places)
        self._show(self._held[:place], parts)
        body = openings[tag]("" if tag in self._silent else tag, self._tools)
        self._begin_call(body, self._held[place + len(tag) :], bare=False)
        return True

    def _begin_call(self, body: CallBody, text: str, *, bare: bool) -> None:
        self._call, self._is_bare = body, bare
        self._held = text
        self._step = self._in_call

    def _in_call(self, parts: Parts) -> bool:
        call = self._call
        if call is None:
            return False
        before = self._held
        self._held = call.push(self._held, self._calls, parts)
        if call.begun:
            self._content, self._called = TrimmedText(), True
        if call.failed and not call.begun:  # what is no call is content, its tag included
            raw = call.raw
            self._show(raw, parts)
            self._step = self._in_content
        elif call.failed or call.done:
            self._step = self._after_call
        else:
            return len(self._held) < len(before)
        return True

    def _after_call(self, parts: Parts) -> bool:
        """The closing tag; where another text comes first, the call ends without."""
        text = self._held.lstrip()
        closings = () if self._syntax is None else self._syntax.closings
        tag = next((tag for tag in closings if text.startswith(tag)), "")
        if not tag and any(tag.startswith(text) for tag in closings):
            return False
        self._held = text[len(tag) :]
        self._step = self._at_content
        return True
