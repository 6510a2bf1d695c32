"""A chat whose last message is left open: its text is that of transformers, and the answer goes on with it."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from text_tokenizers import byte_level
from tiny_chat import TEMPLATE as TINY
from tokenizers import Tokenizer
from unit.test_open_prompts import cut
from unit.test_text_answers import codec as plain_codec
from unit.test_text_answers import streamed
from unit.test_text_chat import CHATML
from unit.test_text_families import FAMILIES

from lowlat.errors import RequestError
from lowlat.ipc.messages import Message
from lowlat.text import AnswerStream, TextCodec
from lowlat.text.grammar.reasoning import Phase, gate_of
from lowlat.text.templates.messages import encode_messages, grow_messages

# SmolLM2's, of the bundled chat pair, as it is published
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{%- set parts = m.content.split('</think>') %}{%- set said = parts[-1].lstrip('\\n') %}
{%- set thought = m.reasoning_content or (parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '') %}
{{- '<|im_start|>assistant\\n' }}{%- if loop.last or thought %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- said.lstrip('\\n') + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {"smollm2": SMOLLM2, "chatml": CHATML, "tiny": TINY, "qwen3": QWEN3} | {
    family: template for family, (template, *_) in FAMILIES.items()
}
USER = {"role": "user", "content": "Tell me a story."}
CONTENTS = ("Once upon", "Once upon ", " Once\n\n", "<think>\nA dragon.\n</think>\n\nOnce", "日本 😀", "a\u00a0")
ROOM: dict[str, Any] = {"allow_special": False, "max_context": 4000, "max_tokens": 1}


def begun(content: str | None, **fields: Any) -> list[dict[str, Any]]:
    """A chat whose answer a client has begun."""
    return [USER, {"role": "assistant", "content": content, **fields}]


@cache
def codec_of(name: str) -> TextCodec:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return TextCodec(byte_level(), templates={"default": TEMPLATES[name]}, special_tokens=named)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    codec, how = codec_of(name), {"bos_token": "<s>", "eos_token": "</s>", "continue_final_message": True}
    for content in CONTENTS:
        messages = begun(content)
        ((theirs,), _) = utils.render_jinja_template([messages], chat_template=TEMPLATES[name], **how)
        ours = codec.apply_chat_template(messages, continue_final_message=True)
        assert (
            ours
            == theirs
            == codec.apply_chat_template(messages, continue_final_message=True, add_generation_prompt=False)
        ), content
        assert ours.rstrip().endswith(content.split("</think>")[-1].strip()) and messages == begun(content)


@pytest.mark.parametrize("name", ["smollm2", "chatml", "gemma3"])
def test_a_message_without_text_is_its_header(name: str) -> None:
    codec = codec_of(name)
    assert codec.apply_chat_template(begun(""), continue_final_message=True) == codec.apply_chat_template([USER])


def test_what_cannot_be_continued_is_refused_by_name() -> None:
    codec = codec_of("smollm2")
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {}}}
    wrong: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        ([USER], {}, "the last message must be the assistant's, got the role 'user'"),
        ([], {}, "the last message must be the assistant's, got the role None"),
        (begun(None), {}, "must have text as its content"),
        (begun("a", tool_calls=[call]), {}, "and no tool_calls"),
        (begun("a"), {"add_generation_prompt": True}, "add_generation_prompt is true, too"),
        (begun("a"), {"add_generation_prompt": 0}, "add_generation_prompt must be true or false, got 0"),
        (begun("a"), {"continue_final_message": "content"}, "continue_final_message must be true or false"),
    ]
    for messages, options, match in wrong:
        with pytest.raises(RequestError, match=match):
            codec.apply_chat_template(messages, **{"continue_final_message": True, **options})
    assert codec.apply_chat_template([USER], add_generation_prompt=False).endswith("a story.<|im_end|>\n")
    for template, times in (
        ("{{ messages[0].content }}", 0),
        ("{% for m in messages * 2 %}{{ m.content }}{% endfor %}", 2),
    ):
        own = TextCodec(byte_level(), templates={"default": template})
        with pytest.raises(RequestError, match=f"writes the last message's text {times} times, not once"):
            own.apply_chat_template(begun("a"), continue_final_message=True)
        own.close()


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "mistral3"])
def test_it_may_come_in_pieces(name: str) -> None:
    codec, source = codec_of(name), random.Random(name)
    text = "Once upon a time, there was </s> a dragon  in 日本. It said: <s>\n\nno"
    options: dict[str, Any] = {"continue_final_message": True}
    chat = [Message("user", "Tell me."), Message("assistant", text)]
    whole = encode_messages(codec, chat, options, **ROOM)
    assert codec.decode(whole, skip_special_tokens=False).endswith(text)
    for _ in range(4):
        growing, found = grow_messages(codec, [chat[0], Message("assistant", None)], options, **ROOM), list[int]()
        for piece in cut(text, source, 9):
            found += growing.append(piece)
        assert found and found + growing.rest() == whole
    with pytest.raises(RequestError, match="add_generation_prompt is true, too"):
        encode_messages(codec, chat, {**options, "add_generation_prompt": True}, **ROOM)


FINAL, ANALYSIS = "<|start|>assistant<|channel|>final<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (f"<|start|>user<|message|>x<|end|>{FINAL}Once upon", " to", (" to", "", [])),
        (FINAL, "assistant<|return|>", ("assistant", "", [])),
        (f"{FINAL}{'long ' * 200}", " a<|return|>", (" a", "", [])),
        (f"{ANALYSIS}It is", f" late.<|end|>{FINAL}Yes", ("Yes", " late.", [])),
        ("<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "{}<|call|>",
         ("", "", [("f", "{}")])),
        ("<|start|>user<|message|>x<|end|><|start|>assistant", "<|channel|>final<|message|>Hi", ("Hi", "", [])),
        (f"{FINAL}It ended.<|return|>", "<|start|>assistant<|channel|>final<|message|>Hi", ("Hi", "", [])),
    ],
)  # fmt: skip
def test_harmonys_answer_goes_on_with_the_message_that_the_prompt_leaves_open(
    prompt: str, answer: str, expected: tuple[str, str, list[Any]]
) -> None:
    before, tokens = (
        plain_codec("harmony").encode(text, add_special_tokens=False, allow_special=True) for text in (prompt, answer)
    )
    for sizes in ([1], [3, 1], [len(tokens)]):
        assert streamed("harmony", tokens, sizes, prefix_ids=before)[0] == expected


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<think>", True),
        ("<think>\n", True),
        (
            "x<think>\nIt is a story of a dragon, and I should tell it slowly, for it is long and the night is short",
            True,
        ),
        ("<think>a</think>\n\nOnce", False),
        ("<think>a<|im_end|>\n<|im_start|>assistant\n", False),
        ("Once upon", False),
    ],
)
def test_a_thought_that_the_prompt_leaves_open_goes_on(prompt: str, is_open: bool) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens(["<think>", "</think>", "<|im_start|>", "<|im_end|>"])
    codec = TextCodec(tokenizer)
    ids = codec.encode(prompt, add_special_tokens=False, allow_special=True)
    stream = AnswerStream(codec, "reasoning", prefix_ids=ids)
    answer = codec.encode(" so.</think>Yes", add_special_tokens=False, allow_special=True)
    deltas = [*(stream.push([token]) for token in answer), stream.finish()]
    reasoning, content = "".join(each.reasoning for each in deltas), "".join(each.text for each in deltas)
    begun = prompt.rpartition("<think>")[2].strip()
    assert (reasoning, content) == (((" so." if begun else "so."), "Yes") if is_open else ("", " so.</think>Yes"))
    gate = gate_of(codec, ids, parsed=True)
    assert (gate is not None and gate.begin.phase is Phase.THINKING) == is_open


def test_a_directorys_template_is_continued_to_the_last_space(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": SMOLLM2}))
    codec = TextCodec.load(tmp_path)
    assert codec is not None
    ids = codec.encode_chat(begun("Once upon "), continue_final_message=True)
    assert codec.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nOnce upon ")
    codec.close()
