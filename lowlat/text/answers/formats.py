"""This module has the formats of tool calls and of reasoning, and finds a model's by its chat template or tokens.

A template that takes tools says in its own text how calls are marked. One that takes none gets them in a prompt of
lowlat's own (`templates.generic_tools`), which asks for Hermes' format. Without a template the vocabulary decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowlat.text.answers.syntax import (
    BRACED_SYNTAX,
    LISTED_SYNTAX,
    LLAMA3_SYNTAX,
    MISTRAL_SYNTAX,
    TAGGED_SYNTAX,
    CallSyntax,
)
from lowlat.text.answers.tagged import THOUGHTS, ThoughtTags
from lowlat.text.codec import TextCodec
from lowlat.text.harmony import HarmonyParser
from lowlat.text.templates.tags import (
    ARGUMENTS_MARK,
    CALL,
    CALLS,
    CHANNEL_CALL,
    END_LISTED,
    FUNCTION,
    LISTED,
    PARAMETER,
    PYTHON_TAG,
    SEED_CALL,
)

__all__ = ["FORMATS", "REASONING", "CallFormat", "format_of", "open_thought", "thought_tags"]

MAX_OPENING_TOKENS = 16  # of a prompt's end, to see whether a tag ends it that is no token


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    name      in messages
    families  that have it
    example   a call
    written   whether the model has it: by a question that says whether a text is spelled by its template, or, where
              there is none, by its vocabulary
    syntax    None for Harmony, which has channels instead
    """

    name: str
    families: str
    example: str
    written: Callable[[Callable[[str], bool]], bool]
    syntax: CallSyntax | None


HARMONY = CallFormat(
    "Harmony",
    "gpt-oss",
    '`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>`',
    lambda has: False,  # its markers decide, whatever the template says
    None,
)
GENERIC = CallFormat(
    "generic",
    "templates that take no tools (R1 distills, Phi, Mistral 7B v0.1, ...): a prompt of lowlat's own",
    '`<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`',
    lambda has: False,
    TAGGED_SYNTAX,
)
FORMATS = (
    HARMONY,
    CallFormat(
        "Mistral",
        "Devstral, Magistral, Ministral 3, Mistral Small 3.2",
        '`[TOOL_CALLS]f[ARGS]{"x": 1}`, also with `[CALL_ID]`',
        lambda has: has(CALLS) and has(ARGUMENTS_MARK),
        MISTRAL_SYNTAX,
    ),
    CallFormat(
        "Mistral, listed",
        "Mistral 7B v0.3, Nemo, Ministral 8B, Mistral Small 3.1",
        '`[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]`',
        lambda has: has(CALLS),
        MISTRAL_SYNTAX,
    ),
    CallFormat(
        "Gemma 4",
        "Gemma 4",
        '`<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>`',
        lambda has: has(CHANNEL_CALL),
        BRACED_SYNTAX,
    ),
    CallFormat(
        "Seed",
        "Seed-OSS",
        "`<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>`",
        lambda has: has(SEED_CALL) and has(FUNCTION) and has(PARAMETER),
        TAGGED_SYNTAX,
    ),
    CallFormat(
        "Qwen3-Coder",
        "Qwen3-Coder, Qwen3.5",
        "`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`",
        lambda has: has(CALL) and has(FUNCTION) and has(PARAMETER),
        TAGGED_SYNTAX,
    ),
    CallFormat(
        "Hermes",
        "Qwen2.5, Qwen3, QwQ, Hermes 2 and 3, Granite 4, SmolLM3",
        '`<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`',
        lambda has: has(CALL) and not has("<arg_key>"),
        TAGGED_SYNTAX,
    ),
    CallFormat(
        "listed, closed",
        "Phi-4-mini",
        '`<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>`',
        lambda has: has(LISTED) and has(END_LISTED),
        LISTED_SYNTAX,
    ),
    CallFormat(
        "listed",
        "Granite 3",
        '`<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]`',
        lambda has: has(LISTED),
        LISTED_SYNTAX,
    ),
    CallFormat(
        "Llama 3",
        "Llama 3.1, 3.2, 3.3",
        '`{"name": "f", "parameters": {"x": 1}}`, several with `;` between, also after `<|python_tag|>`, in a list, or '
        'as `<function=f>{"x": 1}</function>`',
        lambda has: has(PYTHON_TAG) or has('"parameters": dictionary'),
        LLAMA3_SYNTAX,
    ),
    GENERIC,
)
REASONING = (
    ("Harmony", "gpt-oss", "`<|channel|>analysis<|message|>...<|end|>`"),
    ("think", "Qwen3, QwQ, R1 distills, SmolLM3, Magistral 2506", "`<think>...</think>`, or the prompt opens it"),
    ("THINK", "Magistral 2507 and later, Ministral 3", "`[THINK]...[/THINK]`"),
    ("channel", "Gemma 4", "`<|channel>thought ...<channel|>`"),
    ("seed:think", "Seed-OSS", "`<seed:think>...</seed:think>`"),
)


def format_of(codec: TextCodec) -> CallFormat | None:
    """The format of a model's calls; None where none is known: its template takes tools in another, or it has none."""
    if HarmonyParser.speaks(codec):
        return HARMONY
    if codec.has_chat_template and not codec.takes_tools:
        return GENERIC
    has = codec.template_has if codec.has_chat_template else codec.has_token
    return next((kind for kind in FORMATS if kind.written(has)), None)


def thought_tags(codec: TextCodec) -> ThoughtTags | None:
    """The tags of a model's reasoning; None for one that has none."""
    return next((tags for tags in THOUGHTS if codec.spells(tags.closing)), None)


def open_thought(codec: TextCodec, prompt: Sequence[int]) -> tuple[ThoughtTags, bool] | None:
    """The tags of the thought that a prompt leaves open, and whether it has text of it; None where none is open.

    A tag that is a token is the last in the prompt of those next to the tokenizer's model, such as the marks of turns.
    One that is text ends the prompt. Time: that of a look at the tokens after the last of those.
    """
    for place in range(len(prompt) - 1, -1, -1):
        text = codec.tokens_beside.get(prompt[place], "")
        if text.strip():  # some tokenizers have runs of spaces there
            opened = next((tags for tags in THOUGHTS if tags.opening == text), None)
            if opened is not None:
                return opened, bool(codec.decode(prompt[place + 1 :]).strip().removeprefix(opened.label))
            break
    end = codec.decode(prompt[-MAX_OPENING_TOKENS:], skip_special_tokens=False).rstrip()
    spelled = next((tags for tags in THOUGHTS if end.endswith(tags.opening)), None)
    return None if spelled is None else (spelled, False)
