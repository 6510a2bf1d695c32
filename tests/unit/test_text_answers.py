"""Answers taken apart: each format as models write it and as they do not, however the text is cut."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_tokenizers import byte_level
from tokenizers import Tokenizer

from lowlat.options.request import Parse
from lowlat.text import AnswerStream, IncrementalDetokenizer, TextCodec
from lowlat.text.answers.base import AnswerFormat, Parts, Tools
from lowlat.text.answers.harmony import HarmonyAnswer
from lowlat.text.answers.syntax import BRACED_SYNTAX, LISTED_SYNTAX, LLAMA3_SYNTAX, MISTRAL_SYNTAX, TAGGED_SYNTAX
from lowlat.text.answers.tagged import THOUGHTS, TaggedAnswer
from lowlat.text.detokenizer import Marker
from lowlat.text.templates.tags import CALL, END_CALL, END_THOUGHT, PYTHON_TAG, THOUGHT

HARMONY = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
TAGS = [THOUGHT, END_THOUGHT, CALL, END_CALL]
Call = tuple[str, str]
Answer = tuple[str, str, list[Call]]
SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"$ref": "#/$defs/o"},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"o": {"type": "object"}},
}
TOOLS = Tools({"f": SCHEMA, "g": {}})
FORMATS: dict[str, Any] = {
    "tagged": lambda: TaggedAnswer(syntax=TAGGED_SYNTAX, tools=TOOLS),
    "thinking": lambda: TaggedAnswer(thinking=True, syntax=TAGGED_SYNTAX),
    "no tools": TaggedAnswer,
    "llama3": lambda: TaggedAnswer(syntax=LLAMA3_SYNTAX),
    "llama3 tools": lambda: TaggedAnswer(syntax=LLAMA3_SYNTAX, tools=TOOLS),
    "mistral": lambda: TaggedAnswer(syntax=MISTRAL_SYNTAX, thought=THOUGHTS[1]),
    "listed": lambda: TaggedAnswer(syntax=LISTED_SYNTAX),
    "gemma": lambda: TaggedAnswer(syntax=BRACED_SYNTAX, thought=THOUGHTS[3], tools=TOOLS),
    "forced": lambda: TaggedAnswer(syntax=TAGGED_SYNTAX, tools=Tools(required=True)),
    "llama3 forced": lambda: TaggedAnswer(syntax=LLAMA3_SYNTAX, tools=Tools(required=True)),
    "mistral forced": lambda: TaggedAnswer(syntax=MISTRAL_SYNTAX, tools=Tools(required=True)),
}


def answer(parts: Parts) -> Answer:
    """Content, reasoning, calls; each call begins with a name and an id of its own."""
    calls: dict[int, Call] = {}
    ids = set()
    for delta in parts.tool_calls:
        if delta.name is not None:
            assert delta.index == len(calls) and delta.id not in ids
            ids.add(delta.id)
            calls[delta.index] = (delta.name, "")
        name, arguments = calls[delta.index]
        calls[delta.index] = (name, arguments + delta.arguments)
    return parts.content, parts.reasoning, list(calls.values())


def read(parser: AnswerFormat, pieces: list[str]) -> Answer:
    parts = Parts()
    for piece in pieces:
        parser.push([piece], parts)
    parser.finish(parts)
    return answer(parts)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("tagged", "", ("", "", [])),
        ("tagged", " plain <b>text</b> \n", (" plain <b>text</b> \n", "", [])),
        ("tagged", "<think>\nso\n\n</think>\n\nHi. ", ("Hi. ", "so", [])),
        ("tagged", "<think>cut off </thi", ("", "cut off", [])),
        ("tagged", "x</think>y", ("x</think>y", "", [])),
        ("thinking", "so </think> Hi", ("Hi", "so", [])),
        ("no tools", "<think></think>\n<tool_call>{}", ("<tool_call>{}", "", [])),
        (
            "tagged",
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{ é", "b": [1, {}]}}\n</tool_call>\n'
            '<tool_call>{"arguments": {"x": 1 }, "name": "g"}</tool_call>',
            ("Let me see.", "", [("f", '{"a": "}\\"{ é", "b": [1, {}]}'), ("g", '{"x": 1 }')]),
        ),
        ("tagged", '<tool_call>{"name": "f"}</tool_call> done', ("done", "", [("f", "{}")])),
        ("tagged", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"} ', ("", "", [("f", '{"a": 1}')])),
        ("tagged", '<tool_call>{"name": "f", "arguments": {"a": [1', ("", "", [("f", '{"a": [1')])),
        ("tagged", 'Hm. <tool_call>{"name": "f", "arg', ("Hm.", "", [])),
        ("tagged", "Hm. <tool", ("Hm.", "", [])),
        ("tagged", "1 <", ("1 <", "", [])),
        ("tagged", "<tool_call>f(1)</tool_call>", ("<tool_call>f(1)</tool_call>", "", [])),
        ("tagged", '<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', "", [])),
        (
            "tagged",
            '<tool_call>[<tool_call>{"name": "f", "arguments": {}} extra}</tool_call>',
            ("<tool_call>[extra}</tool_call>", "", [("f", "{}")]),
        ),
        ("llama3", '{"name": "f", "parameters": {"a": "b"}}', ("", "", [("f", '{"a": "b"}')])),
        (
            "llama3",
            '{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            ("", "", [("f", "{}"), ("g", "{}")]),
        ),
        ("llama3", ' {"name": "Bob", "age": 3}', (' {"name": "Bob", "age": 3}', "", [])),
        ("llama3", '{"name": "f", "parameters": {}} is it', ("is it", "", [("f", "{}")])),
        ("llama3", "print(1)", ("print(1)", "", [])),
        ("llama3", ' {"name": "f"', (' {"name": "f"', "", [])),
        ("llama3", 'See <function=f>{"a": [1]}</function> so', ("Seeso", "", [("f", '{"a": [1]}')])),
        (
            "llama3",
            '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"x": 1}}]',
            ("", "", [("f", "{}"), ("g", '{"x": 1}')]),
        ),
        (
            "llama3",
            '{"name": "f", "parameters": {}};\n{"name": "f", "arguments": {}};',
            ("", "", [("f", "{}"), ("f", "{}")]),
        ),
        ("llama3", '[1, {"name": 2}]', ('[1, {"name": 2}]', "", [])),
        ("llama3 tools", '{"name": "h", "parameters": {}}', ('{"name": "h", "parameters": {}}', "", [])),
        ("llama3 tools", '[{"name": "h", "parameters": {}}]', ('[{"name": "h", "parameters": {}}]', "", [])),
        ("llama3 tools", f'So: {PYTHON_TAG}{{"name": "f", "parameters": {{}}}}', ("So:", "", [("f", "{}")])),
        ("llama3 forced", ' {"name": "f"', ("", "", [])),
        ("forced", '<tool_call>\n{"name": "f"', ("", "", [])),
        ("forced", "<to", ("", "", [])),
        ("mistral forced", "[TOOL_CALLS]weath", ("", "", [])),
        (
            "tagged",
            'I see.\n<tool_call>\n<function=f>\n<parameter=s>\n 1\nline "2" </x>\n</parameter>\n<parameter=i>\n42\n'
            "</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=l>\n[1, {}]\n</parameter>\n<parameter=o>\n"
            '{"a": null}\n</parameter>\n<parameter=m>\nnull\n</parameter>\n</function>\n</tool_call>\n'
            "<tool_call>\n<function=g>\n</function>\n</tool_call> end",
            (
                "I see.end",
                "",
                [
                    (
                        "f",
                        '{"s": " 1\\nline \\"2\\" </x>", "i": 42, "b": true, "l": [1, {}], '
                        '"o": {"a": null}, "m": null}',
                    ),
                    ("g", "{}"),
                ],
            ),
        ),
        (
            "tagged",
            "<function=f><parameter=m>x</parameter><parameter=z>7</parameter><parameter=s>\n1\n</function>\n</tool_call>",
            ("", "", [("f", '{"m": "x", "z": 7, "s": "1"}')]),
        ),
        (
            "tagged",
            "<function=f><parameter=s>\n<function=g>\n<parameter=x>\n</function>\nso</parameter></tool_call>",
            ("", "", [("f", '{"s": "<function=g>\\n<parameter=x>\\n</function>\\nso"}')]),
        ),
        ("tagged", "<tool_call><function=f>\n<parameter=s>\n\n</parameter></function>", ("", "", [("f", '{"s": ""}')])),
        ("tagged", "<tool_call><function=f>\n<parameter=s>\nab", ("", "", [("f", '{"s": "ab')])),
        ("tagged", "<tool_call><function=f>\n<parameter=i>\n4", ("", "", [("f", '{"i": ')])),
        ("tagged", "<tool_call><function=f", ("", "", [])),
        ("tagged", "The tag <function=x> is text", ("The tag <function=x> is text", "", [])),
        (
            "tagged",
            '<seed:tool_call><function=g><parameter=k>"v"</parameter></function></seed:tool_call>',
            ("", "", [("g", '{"k": "\\"v\\""}')]),
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "abcdefghi"}, {"name": "g"}]',
            ("", "", [("f", '{"a": "]"}'), ("g", "{}")]),
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": "}"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{} ok',
            ("ok", "", [("f", '{"a": "}"}'), ("g", "{}")]),
        ),
        ("mistral", '[TOOL_CALLS]f{"a": 1', ("", "", [("f", '{"a": 1')])),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', ("", "", [("f", "{}")])),
        ("mistral", "[THINK]hm[/THINK]Yes. [TOOL_CALLS]fo", ("Yes.", "hm", [])),
        ("mistral", "[TOOL_CALLS] is what {I} write", ("[TOOL_CALLS] is what {I} write", "", [])),
        ("listed", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', ("", "", [("f", '{"a": 1}')])),
        ("listed", '<|tool_call|>[{"name": "f", "argu', ("", "", [])),
        ("listed", "<|tool_call|>[]x", ("<|tool_call|>[]x", "", [])),
        (
            "gemma",
            "<|channel>thought\nso it is\n<channel|>Look. "
            '<|tool_call>call:f{b:true,i:-2.5,l:[1,<|"|>a, "b"}\n<|"|>,[]],o:{x:{},y:null},s:<|"|>é\\<|"|>}<tool_call|>'
            "<|tool_call>call:g{}<tool_call|>",
            (
                "Look.",
                "so it is",
                [
                    (
                        "f",
                        '{"b": true, "i": -2.5, "l": [1, "a, \\"b\\"}\\n", []], "o": {"x": {}, "y": null}, '
                        '"s": "\u00e9\\\\"}',
                    ),
                    ("g", "{}"),
                ],
            ),
        ),
        ("gemma", "<|channel>thought\n<channel|>Hi", ("Hi", "", [])),
        (
            "gemma",
            '<|tool_call>call:f{s:12,k: "a\\"b",w:word }',
            ("", "", [("f", '{"s": "12", "k": "a\\"b", "w": "word"}')]),
        ),
        ("gemma", "<|tool_call>call:f{i:1<tool_call|>", ("", "", [("f", '{"i": ')])),
        ("gemma", "<|tool_call>cal", ("", "", [])),
        ("gemma", "<|tool_call>what {it} is", ("<|tool_call>what {it} is", "", [])),
    ],
)
def test_answers_are_read_however_they_are_cut(kind: str, text: str, expected: Answer) -> None:
    assert read(FORMATS[kind](), [text]) == expected
    assert read(FORMATS[kind](), list(text)) == expected
    for place in range(len(text)):
        assert read(FORMATS[kind](), [text[:place], text[place:]]) == expected


PIECES = st.sampled_from(
    [
        *TAGS,
        "<function=",
        "f>",
        "<parameter=",
        "s>",
        "i>",
        "</parameter>",
        "</function>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|tool_call|>",
        '{"name": "f"',
        ', "arguments": {',
        '"parameters": {',
        "}",
        '"',
        "\\",
        "[",
        ";",
        " ",
        "\n",
        "é",
    ]
)


@given(st.lists(PIECES | st.text(max_size=3), max_size=25), st.lists(st.integers(1, 9), min_size=1), st.data())
def test_any_text_is_read_the_same_however_it_is_cut(written: list[str], sizes: list[int], data: st.DataObject) -> None:
    text = "".join(written)
    kind = data.draw(st.sampled_from(list(FORMATS)))
    pieces: list[str] = []
    at = 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    whole = read(FORMATS[kind](), [text])
    assert whole == read(FORMATS[kind](), pieces)
    if kind == "tagged" and not any(tag in text for tag in ("<",)):
        assert whole == (text, "", [])


VALUES = st.recursive(
    st.none() | st.text() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES, st.text(min_size=1, max_size=200))
def test_any_arguments_come_as_they_were_written(value: Any, name: str) -> None:
    written = json.dumps({"a": value})
    call = json.dumps({"name": name, "arguments": json.loads(written)})
    assert read(FORMATS["tagged"](), list(f"{CALL}{call}{END_CALL}")) == ("", "", [(name, written)])


@pytest.mark.parametrize("tools", [True, False])
def test_harmonys_channels_are_parts(tools: bool) -> None:
    written = [
        "<|channel|>", "analysis", "<|message|>", "Hm", "m.", "<|end|>",
        "<|start|>", "assistant", "<|channel|>", "commentary", "<|message|>", "I look. ", "<|end|>",
        "<|start|>", "assistant", "<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>",
        '{"a"', ": 1}", "<|call|>", "<|start|>", "assistant to=functions.g", "<|channel|>", "commentary",
        "<|message|>", "<|call|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "4", "<|return|>",
    ]  # fmt: skip
    pieces = [Marker(piece) if piece in HARMONY else piece for piece in written]
    content, reasoning, calls = read(HarmonyAnswer(tools=Tools() if tools else None), pieces)
    assert content == "I look. 4"
    assert (reasoning, calls) == (("Hmm.", [("f", '{"a": 1}'), ("g", "{}")]) if tools else ('Hmm.{"a": 1}', []))


@cache
def codec(kind: str) -> TextCodec:
    """A small tokenizer that marks answers as a family does: as special tokens or as plain ones."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    if kind == "qwen":
        tokenizer.add_tokens(TAGS)
    elif kind != "plain":
        tokenizer.add_special_tokens(HARMONY if kind == "harmony" else [PYTHON_TAG])
    return TextCodec(tokenizer)


def streamed(kind: str, tokens: list[int], sizes: list[int], **options: Any) -> tuple[Answer, str | None, int]:
    parse: Parse = options.pop("parse", "tools")
    stream = AnswerStream(codec(kind), parse, **options)
    parts, used, at = Parts(), 0, 0
    stopped = None
    while at < len(tokens) and stopped is None:
        size = sizes[at % len(sizes)]
        delta = stream.push(tokens[at : at + size])
        parts = Parts(
            parts.content + delta.text, parts.reasoning + delta.reasoning, [*parts.tool_calls, *delta.tool_calls]
        )
        at, used, stopped = at + size, used + delta.num_tokens_used, delta.stopped
    if stopped is None:
        delta = stream.finish()
        parts = Parts(
            parts.content + delta.text, parts.reasoning + delta.reasoning, [*parts.tool_calls, *delta.tool_calls]
        )
        stopped = delta.stopped
    return answer(parts), stopped, used


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("qwen", '<think>naïve</think>\n\n<tool_call>{"name": "f", "arguments": {"ü": 1}}</tool_call>',
         ("", "naïve", [("f", '{"ü": 1}')])),
        ("harmony", "<|channel|>analysis<|message|>naïve<|end|><|start|>assistant<|channel|>final<|message|>ü",
         ("ü", "naïve", [])),
        ("llama3", f'{PYTHON_TAG}{{"name": "f", "parameters": {{"ü": 1}}}}', ("", "", [("f", '{"ü": 1}')])),
        ("plain", "<think>x</think>", ("<think>x</think>", "", [])),
    ],
)  # fmt: skip
def test_a_models_format_is_found_and_read_from_its_tokens(kind: str, text: str, expected: Answer) -> None:
    tokens = codec(kind).encode(text, add_special_tokens=False, allow_special=True)
    for sizes in ([1], [3, 1], [len(tokens)]):
        assert streamed(kind, tokens, sizes) == (expected, None, len(tokens))
    unparsed = streamed(kind, tokens, [1], parse="none")[0]
    assert unparsed == (codec(kind).decode(tokens), "", [])


def test_a_thought_that_the_prompt_opened_goes_on() -> None:
    prompt = codec("qwen").encode("Q: 1 + 1?\n<think>\n", add_special_tokens=False, allow_special=True)
    tokens = codec("qwen").encode("two</think>2", add_special_tokens=False, allow_special=True)
    assert streamed("qwen", tokens, [1], prefix_ids=prompt, parse="reasoning")[0] == ("2", "two", [])


@pytest.mark.parametrize("kind", ["qwen", "harmony", "llama3"])
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_parsing_changes_neither_tokens_nor_where_they_stop(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    own = codec(kind)
    marks = [own.token_id(text) for text in (*HARMONY, *TAGS, PYTHON_TAG)]
    known = [mark for mark in marks if mark is not None]
    tokens = data.draw(st.lists(st.sampled_from(known) | st.integers(0, 345), max_size=40))
    stop = data.draw(st.lists(st.sampled_from(["a", "the", "e ", "<think>", "}"]), max_size=2))
    parsed, stopped, used = streamed(kind, tokens, sizes, stop=stop)
    plain = IncrementalDetokenizer(own, stop=stop)
    delta = plain.push(tokens)
    text = delta.text + ("" if delta.stopped else plain.finish())
    assert (stopped, used) == (plain.stopped, delta.num_tokens_used)
    assert parsed == streamed(kind, tokens, [1], stop=stop)[0]
    for part in (parsed[0], parsed[1], *(piece for call in parsed[2] for piece in call)):
        left = iter(text)
        assert all(character in left for character in part), "in order, and nothing that the text does not have"


@pytest.mark.parametrize(
    ("kind", "prompt", "pieces", "num_reasoning"),
    [  # tokens, where special ones stand for themselves, and how many of them are reasoning
        ("qwen", "", ["<think>", "na", "ü", "ve", "  ", "</think>", "\n\n", "Hi", " you"], 6),
        ("qwen", "<think>", ["na", "ïve", "</think>", "Hi"], 3),
        ("qwen", "", ["<think>", "cut"], 2),
        ("qwen", "", ["Hi", "<think>", "x", "</think>"], 0),
        ("qwen", "", ["<think>", "x", "</think>", '<tool_call>{"name": "f", ', '"arguments": {}}</tool_call>'], 3),
        ("harmony", "", ["<|channel|>", "analysis", "<|message|>", "na", "ve", "<|end|>", "<|start|>", "assistant",
                         "<|channel|>", "final", "<|message|>", "Hi"], 6),
        ("harmony", "", ["<|channel|>", "final", "<|message|>", "Hi", "<|end|>"], 0),
        ("plain", "", ["<think>", "x", "</think>"], 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [100]], ids=str)
def test_tokens_of_reasoning_are_counted_however_they_come(
    kind: str, prompt: str, pieces: list[str], num_reasoning: int, sizes: list[int]
) -> None:
    """One by one, by steps of several, of which one may end the reasoning and begin the text, and all at once.

    Tokens are bytes but for the tags, so that a piece has as many tokens as bytes, and a tag's piece has one.
    """
    reader = codec(kind)
    encoded = [reader.encode(piece, add_special_tokens=False, allow_special=True) for piece in pieces]
    tokens = [token for each in encoded for token in each]
    stream = AnswerStream(reader, "tools", prefix_ids=reader.encode(prompt, allow_special=True) if prompt else ())
    at, turn = 0, 0
    while at < len(tokens):
        size = sizes[turn % len(sizes)]
        stream.push(tokens[at : at + size])
        at, turn = at + size, turn + 1
    stream.finish()
    assert stream.num_reasoning_tokens == sum(map(len, encoded[:num_reasoning]))
