"""The position of a request in its grammar: masks, ends, rollback, reasoning, forced tokens, calls."""

import json
import re
from typing import Any

import pytest
from grammars import END, HARMONY, allowed, codec_with, dumped, mask_of, state_of, text_of, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.errors import GrammarError, RequestError
from lowlat.text import TextCodec
from lowlat.text.grammar.state import GrammarState

CODEC = codec_with()
THINKER = codec_with("<think>", "</think>", "<tool_call>", "</tool_call>")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DOCUMENT = '{"name": "Bob", "age": 12}'


def ids_of(text: str, codec: TextCodec = CODEC) -> list[int]:
    return codec.encode(text, add_special_tokens=False, allow_special=True)


def takes(state: GrammarState, tokens: list[int], codec: TextCodec) -> bool:
    """Whether each token is allowed by the mask before it, and the end after them; the tokens are committed."""
    for token in tokens:
        if token not in allowed(mask_of(state, codec)[0]):
            return False
        state.advance([token])
    return END in allowed(mask_of(state, codec)[0])


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"json_schema": PERSON}, [DOCUMENT], ['{"age": 1}', "[]", '{"name": "x", "age": "1"}']),
        ({"json_schema": json.dumps(PERSON)}, [DOCUMENT], [DOCUMENT + "}"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a": }']),
        ({"regex": r"(\d{3})-[a-f]+"}, ["123-abc"], ["12-abc", "123-", "123-abg"]),
        ({"regex": "^yes$"}, ["yes"], ["no", "yesyes"]),
        ({"choice": ["yes", 'n"o\\', "日本\n"]}, ["yes", 'n"o\\', "日本\n"], ["ye", "no", "yes!"]),
        ({"grammar": 'root ::= "a" root "b" | "c"'}, ["c", "aacbb"], ["aacb", "acbb", ""]),
        ({"grammar": 'start: /[0-9]+/ ("+" /[0-9]+/)*'}, ["1+22"], ["1+", "+"]),
    ],
)
def test_documents_of_the_grammar_are_allowed_and_no_others(
    options: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert takes(state_of(CODEC, **options), ids_of(text), CODEC), text
    for text in bad:
        assert not takes(state_of(CODEC, **options), ids_of(text), CODEC), text


def test_special_and_padding_tokens_are_no_text() -> None:
    codec = codec_with("<|end|>", special=True)
    state = state_of(codec, regex="(.|\n)*")
    found = allowed(mask_of(state, codec)[0])
    assert END in found and codec.token_id("<|end|>") not in found and max(found) < codec.vocab_size
    assert len(found) > 0.95 * codec.vocab_size  # but for bytes that begin no character


def test_fill_after_termination_allows_the_requests_ends_alone() -> None:
    codec = codec_with("<|end|>", special=True)
    (other,), (text,) = ids_of("<|end|>", codec), ids_of("z", codec)
    state = state_of(codec, stop_ids=(END, other, text), json_schema=PERSON)
    tokens = ids_of(DOCUMENT, codec)
    state.advance(tokens)
    assert state.terminated and state.active
    for _ in range(2):
        assert allowed(mask_of(state, codec)[0]) == sorted((END, other))
    rows = mask_of(state, codec, [0, END, END, tokens[0]], [-1, 0, 1, 0])
    assert [allowed(row) == sorted((END, other)) for row in rows[:3]] == [True] * 3 and (rows[3] == -1).all()
    state.advance([END, END])
    assert state.terminated and allowed(mask_of(state, codec)[0]) == sorted((END, other))
    with pytest.raises(GrammarError, match="not allowed"):
        state.advance([tokens[0]])


def test_an_end_is_allowed_where_the_document_may_end_and_nowhere_else() -> None:
    state = state_of(CODEC, regex="[0-9]+")
    assert END not in allowed(mask_of(state, CODEC)[0])
    with pytest.raises(GrammarError):
        state.advance([END])
    state.advance(ids_of("7"))
    assert END in allowed(mask_of(state, CODEC)[0]) and not state.terminated
    without = state_of(CODEC, stop_ids=(), regex="[0-9]+")
    without.advance(ids_of("7"))
    assert END not in allowed(mask_of(without, CODEC)[0])
    without = state_of(CODEC, stop_ids=(), choice=["yes"])
    without.advance(ids_of("yes"))
    assert without.terminated and not mask_of(without, CODEC).any() and without.forced(4) == []


def test_drafts_change_nothing_accepted_or_rejected() -> None:
    """Rollback after a rejected draft: masks are those of a state that never saw one, also after a drafted end."""
    tokens = ids_of(DOCUMENT)
    state, plain = state_of(CODEC, json_schema=PERSON), state_of(CODEC, json_schema=PERSON)
    for place, token in enumerate(tokens):
        wrong = ids_of("}")[0]
        for draft in ([0, *tokens[place:], END], [0, wrong, wrong], [0, token, END, wrong]):
            mask_of(state, CODEC, draft, range(-1, len(draft) - 1))
        assert (mask_of(state, CODEC) == mask_of(plain, CODEC)).all()
        state.advance([token])
        plain.advance([token])
    assert state.terminated and plain.terminated


def test_a_drafts_masks_leave_nothing_of_its_path_behind() -> None:
    """The library's rollback keeps parts of a path whose mask was computed: siblings as long as it got its masks."""
    options: dict[str, Any] = {"grammar": 'root ::= "(" root ")" root | "x"*'}
    taken, (one, other) = ids_of("(()(())"), (ids_of("()")[0], ids_of("((")[0])
    plain = state_of(CODEC, **options)
    plain.advance([*taken, other])
    state = state_of(CODEC, **options)
    state.advance(taken)
    rows = mask_of(state, CODEC, [0, one, other], (-1, 0, 0))
    state.advance([other])
    assert (rows[2] == mask_of(plain, CODEC)[0]).all() and (rows[2] == mask_of(state, CODEC)[0]).all()


def test_a_token_that_is_forbidden_is_an_error_and_changes_nothing() -> None:
    state = state_of(CODEC, json_schema=PERSON)
    state.advance(ids_of("{"))
    with pytest.raises(GrammarError, match="1 tokens into the answer"):
        state.advance(ids_of("{"))
    assert takes(state, ids_of(DOCUMENT[1:]), CODEC)


def test_forced_tokens_are_those_the_tokenizer_would_write() -> None:
    state = state_of(CODEC, json_schema=PERSON)
    forced = state.forced(16)
    assert text_of(CODEC, forced).startswith('{"name":') and forced == ids_of(DOCUMENT)[: len(forced)]
    assert state.forced(1) == forced[:1] and state.forced(0) == []
    for token in forced:
        assert token in allowed(mask_of(state, CODEC)[0])
        state.advance([token])
    state.advance(ids_of(DOCUMENT)[len(forced) :])
    assert state.forced(3) == [END]


@settings(max_examples=30)
@given(st.data())
def test_a_trees_masks_are_those_of_its_paths(data: st.DataObject) -> None:
    """fill on a tree equals fill after advance, path by path."""
    options: dict[str, Any] = data.draw(
        st.sampled_from(
            [
                {"json_schema": PERSON},
                {"regex": "(a|ab|abc)*d?[0-9]{0,3}"},
                {"grammar": 'root ::= "(" root ")" root | "x"*'},
                {"choice": ["one", "ones", "two"]},
            ]
        )
    )
    state = state_of(CODEC, **options)
    taken = (walk(state_of(CODEC, **options), CODEC, data.draw(st.integers(0, 9))) or [])[:12]
    taken = taken[: data.draw(st.integers(0, len(taken)))]
    state.advance(taken)
    tokens, parents = [0], [-1]
    masks = mask_of(state, CODEC)
    for _ in range(data.draw(st.integers(1, 7))):
        parent = data.draw(st.integers(0, len(tokens) - 1))
        pool = allowed(masks[parent])[:50] if data.draw(st.booleans()) else [END, *ids_of("}a1(,")]
        tokens.append(data.draw(st.sampled_from(pool or [END])))
        parents.append(parent)
        masks = mask_of(state, CODEC, tokens, parents)
    for row in range(len(tokens)):
        path, place = [], row
        while place:
            path.append(tokens[place])
            place = parents[place]
        alone = state_of(CODEC, **options)
        alone.advance(taken)
        try:
            alone.advance(path[::-1])
        except GrammarError:
            assert (masks[row] == -1).all()
        else:
            assert allowed(masks[row]) == allowed(mask_of(alone, CODEC)[0])


@pytest.mark.parametrize("codec", [THINKER, CODEC], ids=["one token", "several tokens"])
@pytest.mark.parametrize("behind", ["", "\n\n"])
def test_the_grammar_begins_behind_the_thought_also_within_drafts(codec: TextCodec, behind: str) -> None:
    thought, document = ids_of("{hm}</think>", codec), ids_of(DOCUMENT, codec)
    tokens = thought + ids_of(behind, codec) + document
    state = state_of(codec, "Q<think>\n", json_schema=PERSON)
    rows = mask_of(state, codec, [0, *tokens], range(-1, len(tokens)))
    assert not state.active and (rows[: len(thought)] == -1).all()
    plain = state_of(codec, json_schema=PERSON)
    for place, token in enumerate(document, len(tokens) - len(document) + 1):
        plain.advance([token])
        assert (rows[place] == mask_of(plain, codec)[0]).all()
    state.advance(tokens[: len(thought) + 1])  # a step that commits the end of the thought and what follows it
    assert state.active
    rest = tokens[len(thought) + 1 :]
    assert takes(state, rest, codec)


def test_no_brace_is_doubled_where_the_document_begins_within_a_token() -> None:
    codec = codec_with('</think>{"')
    state = state_of(codec, "<think>", json_schema=PERSON)
    (opening,) = ids_of('</think>{"', codec)
    assert (mask_of(state, codec, [0, opening], (-1, 0))[0] == -1).all()
    state.advance([opening])
    found = [text_of(codec, [token]) for token in allowed(mask_of(state, codec)[0])]
    assert found and all("name".startswith(text[:4]) for text in found)


def test_a_model_may_think_first_where_its_reasoning_is_taken_out() -> None:
    think, brace = THINKER.token_id("<think>"), ids_of('{"', THINKER)[0]
    assert think is not None
    state = state_of(THINKER, json_schema=PERSON, parse="reasoning")
    assert {think, brace} <= set(allowed(mask_of(state, THINKER)[0]))
    state.advance([think, *ids_of("so</think>", THINKER)])
    assert think not in allowed(mask_of(state, THINKER)[0]) and takes(state, ids_of(DOCUMENT, THINKER), THINKER)
    for prompt, parse in (("x", "none"), ("<think>\n\n</think>\n\n", "reasoning")):
        assert think not in allowed(mask_of(state_of(THINKER, prompt, json_schema=PERSON, parse=parse), THINKER)[0])


@pytest.mark.parametrize("header", ["final", "final <|constrain|>json", "commentary", "analysis<|channel|>final"])
def test_harmonys_document_is_its_first_content(header: str) -> None:
    codec = codec_with(*HARMONY, special=True)
    analysis = "<|channel|>analysis<|message|>{final}<|end|><|start|>assistant"
    before = ids_of(f"{analysis}<|channel|>{header}<|message|>", codec)
    state = state_of(codec, "<|start|>user<|message|>x<|end|><|start|>assistant", json_schema=PERSON)
    tokens = before + ids_of(DOCUMENT, codec)
    rows = mask_of(state, codec, [0, *tokens], range(-1, len(tokens)))
    assert allowed(rows[-1]) == [END]
    for place, token in enumerate(before):  # bound where a message begins, and free in headers and in the analysis
        assert token in allowed(rows[place])
        bound = (rows[place] != -1).any()
        assert not bound or allowed(rows[place]) == [token]
        begun = re.search(r"(<\|end\|>|<\|start\|>[a-z]*)$", text_of(codec, before[:place]))
        assert bound == (place == 0 or begun is not None)
    assert text_of(codec, allowed(rows[len(before)])).startswith("{")
    state.advance(before)
    assert state.active and takes(state, ids_of(DOCUMENT, codec), codec)
    for text in ("Hello", "<|message|>Hello", "<|channel|>commentary<|message|>Hello", f"{analysis} Hello"):
        assert not takes(state_of(codec, "<|start|>assistant", json_schema=PERSON), ids_of(text, codec), codec)
    prefilled = state_of(codec, "<|start|>assistant<|channel|>final<|message|>", json_schema=PERSON)
    assert prefilled.active and state_of(codec, "plain text", json_schema=PERSON).active


WEATHER = {"name": "weather", "parameters": PERSON, "strict": True}
TIME = {"name": "time"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"name": "Bob", "age": 12}}\n</tool_call>'


@pytest.mark.parametrize("special", [False, True])
def test_tagged_calls_fit_their_functions(special: bool) -> None:
    codec = codec_with("<tool_call>", "</tool_call>", special=special)
    calls: dict[str, Any] = {"functions": [WEATHER, TIME]}
    other = '<tool_call>\n{"name": "time", "arguments": {"any": [1]}}\n</tool_call>'
    wrong = CALL.replace("12", '"12"')
    for required, text, good in [
        (True, CALL, True),
        (True, f"{CALL}\n{other}", True),
        (True, "Hello", False),
        (True, wrong, False),
        (True, CALL.replace("weather", "news"), False),
        (False, "Hello", True),
        (False, f"Hello\n{CALL}\nand {other}", True),
        (False, f"Hello\n{wrong}", False),
    ]:
        state = state_of(codec, tool_calls=calls | {"required": required}, parse="tools")
        assert takes(state, ids_of(text, codec), codec) == good, text
    state = state_of(codec, tool_calls=calls | {"required": True, "parallel": False}, parse="tools")
    assert not takes(state, ids_of(f"{CALL}\n{CALL}", codec), codec)


def test_calls_of_llama_and_harmony_fit_their_functions() -> None:
    llama, harmony = codec_with("<|python_tag|>", special=True), codec_with(*HARMONY, special=True)
    call = '{"name": "weather", "parameters": {"name": "Bob", "age": 12}}'
    channel = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + DOCUMENT
    note = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Hello"
    for codec, required, text, good in [
        (llama, True, call, True),
        (llama, True, call.replace("12", "{}"), False),
        (llama, False, "Hello {", True),
        (llama, False, call, True),
        (llama, False, '{"a": 1}', False),
        (harmony, True, channel, True),
        (harmony, True, note + channel, True),
        (harmony, True, note + final, False),
        (harmony, False, note + final, True),
        (harmony, False, channel.replace("12", "true"), False),
    ]:
        calls = {"functions": [WEATHER], "required": required}
        state = state_of(codec, "<|start|>assistant" if codec is harmony else "x", tool_calls=calls, parse="tools")
        assert takes(state, ids_of(text, codec), codec) == good, text


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_is_calls_or_a_document(strict: bool) -> None:
    """As agents ask that have both tools and a type of answers."""
    tagged = codec_with("<tool_call>", "</tool_call>", special=True)
    llama, harmony = codec_with("<|python_tag|>", special=True), codec_with(*HARMONY, special=True)
    called = '{"name": "weather", "parameters": {"name": "Bob", "age": 12}}'
    channel = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + DOCUMENT
    final = "<|channel|>final<|message|>"
    document = {"schema": PERSON, "strict": strict}
    for codec, text, good in [
        (tagged, CALL, True),
        (tagged, DOCUMENT, True),
        (tagged, "Hello", False),
        (tagged, DOCUMENT.replace("12", "{}"), False),
        (tagged, DOCUMENT + CALL, False),
        (llama, called, True),
        (llama, DOCUMENT, True),
        (llama, "Hello", False),
        (harmony, channel, True),
        (harmony, final + DOCUMENT, True),
        (harmony, final + "Hello", False),
    ]:
        calls = {"functions": [WEATHER, TIME], "document": document}
        state = state_of(codec, "<|start|>assistant" if codec is harmony else "x", tool_calls=calls, parse="tools")
        assert takes(state, ids_of(text, codec), codec) == good, text


@pytest.mark.parametrize("calls", ['{"functions": []}', "[", '{"functions": [{"name": "x", "more": 1}]}'])
def test_wrong_lists_of_calls_are_refused(calls: str) -> None:
    with pytest.raises(RequestError, match="tool_calls: "):
        state_of(THINKER, tool_calls=calls)
    with pytest.raises(RequestError, match="format of calls"):
        state_of(CODEC, tool_calls={"functions": [TIME]})


def test_a_document_of_unicode_comes_through_tokens_that_split_characters() -> None:
    text = dumped({"name": "日本 👩‍👩‍👧 é", "age": 3})
    assert takes(state_of(CODEC, json_schema=PERSON), ids_of(text), CODEC)
