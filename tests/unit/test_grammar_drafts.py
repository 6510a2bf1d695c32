"""Masks of drafted paths that are accepted in part: as without drafts, at a cost of the drafts alone."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grammars import END, allowed, codec_with, compiler_of, mask_of, state_of
from stages import staged

from lowlat.errors import GrammarError
from lowlat.options.request import SamplingParams
from lowlat.text import TextCodec
from lowlat.text.grammar import matching
from lowlat.text.grammar.matching import MatchedGrammar

CODEC = codec_with()
THINKER = codec_with("<think>", "</think>")
CALLER = codec_with("<tool_call>", "</tool_call>", special=True)
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
ALIKE = ["aa", "ab", "the constant text of some length", "the constant text of another"]
ROOT = NODE | {"$defs": {"node": NODE}}
CALLS = {"functions": [{"name": "go", "parameters": ROOT, "strict": True}, {"name": "rest"}]}
GRAMMARS: dict[str, tuple[TextCodec, dict[str, Any]]] = {
    # places of the same number of lexemes and the same state of the lexer, where other tokens may follow
    "brackets": (CODEC, {"grammar": 'root ::= "(" root ")" root | "x"*'}),
    "kinds of brackets": (CODEC, {"grammar": 'root ::= ("ab" | "ac" | "a" [0-9]) ("{" root "}" | "[" root "]")?'}),
    "object": (CODEC, {"json_object": True}),
    "recursion": (CODEC, {"json_schema": ROOT}),
    "constants": (CODEC, {"json_schema": {"anyOf": [{"type": "array", "items": {"enum": ALIKE}}, {"enum": ALIKE}]}}),
    "choices": (CODEC, {"choice": ["one", "ones", "two", "twofold", "the quick brown fox", "the quick brown dog"]}),
    "expression": (CODEC, {"regex": "(a|ab|abc)*d?[0-9]{0,3}"}),
    "spaces": (CODEC, {"grammar": 'start: (A | B)+ C\nA: /[a-z]+/\nB: /[0-9]+/\nC: "!" A "?"\n%ignore /[ ]+/'}),
    "nothing forced": (CODEC, {"grammar": '%llguidance {"no_forcing": true}\nstart: ("the constant " /[0-9]/ "!a")+'}),
    "schema in rules": (CODEC, {"grammar": f'start: (%json {json.dumps(ROOT)} | /[a-z]+/) "!"'}),
    "suffix": (CODEC, {"grammar": 'start: (word "x")+\nword[suffix="end"]: /[a-z ]*/'}),
    "reasoning": (THINKER, {"choice": ["one", "two of them"], "prompt": "<think>"}),
    "reasoning at will": (THINKER, {"json_schema": ROOT, "parse": "reasoning"}),
    # these the library cannot roll back, or not rightly
    "limits of tokens": (CODEC, {"grammar": 'start: ("<" n ">")+\nn[max_tokens=3]: /[a-z ]*/'}),
    "what stops": (CODEC, {"grammar": 'start: ("[" word "]")+\nword[stop=";"]: /.*/'}),
    "tokens by number": (CODEC, {"grammar": 'start: (/[a-c]+/ "!" <[88]> <[353]> <[89]>)+ | <[88]> <[89]> <[90]>'}),
    "special tokens": (CALLER, {"grammar": 'start: (/[a-c]+/ "!" <tool_call> "y" </tool_call>)+'}),
    "forced calls": (CALLER, {"tool_calls": CALLS | {"required": True}}),
    "calls": (CALLER, {"tool_calls": CALLS, "parse": "tools"}),
}


pytestmark = pytest.mark.usefixtures("untimed")


def alone(name: str, tokens: Sequence[int]) -> np.ndarray | None:
    """The mask after these tokens of a state that has seen nothing else; None where they are forbidden."""
    codec, options = GRAMMARS[name]
    state = state_of(codec, **options)
    try:
        state.advance(tokens)
        mask: np.ndarray = mask_of(state, codec)[0]
    except GrammarError:
        return None
    return mask


def follows(codec: TextCodec, mask: np.ndarray | None) -> list[int]:
    """The tokens that a mask allows, of those that there are; none after what is forbidden."""
    return [] if mask is None else [token for token in allowed(mask) if token < codec.vocab_size]


def play(name: str, chance: random.Random) -> int:
    """Fill masks of trees by chance, commit part of a path and a token after it, and again; returns rows compared."""
    codec, options = GRAMMARS[name]
    committed: list[int] = []
    state, num_rows = state_of(codec, **options), 0
    for _ in range(chance.randrange(1, 12)):
        root = alone(name, committed)
        if root is None:
            return num_rows
        tokens, parents, masks = [0], [-1], [root]
        forced = state.forced(4) if chance.random() < 0.5 else []
        for place in range(chance.randrange(7)):
            parent = chance.randrange(len(tokens)) if chance.random() < 0.5 else len(tokens) - 1
            may_follow = follows(codec, masks[parent])
            if codec is THINKER and chance.random() < 0.3:
                token = codec.encode(chance.choice(("<think>", "</think>")), allow_special=True)[-1]
            elif parent == place < len(forced):
                token = forced[place]
            elif may_follow and chance.random() < 0.85:
                token = chance.choice(may_follow[: chance.choice((40, len(may_follow)))])
            else:
                token = chance.randrange(codec.vocab_size)
            above, row = [], parent
            while row:
                above.append(tokens[row])
                row = parents[row]
            tokens.append(token)
            parents.append(parent)
            masks.append(alone(name, [*committed, *above[::-1], token]))  # type: ignore[arg-type]
        found = mask_of(state, codec, tokens, parents)
        for row, (mine, wanted) in enumerate(zip(found, masks, strict=True)):
            fits = set(mine.tolist()) <= {0, -1} if wanted is None else bool((mine == wanted).all())
            assert fits, (name, committed, tokens, parents, row)
        num_rows += len(tokens)
        step, row = [], 0
        while drafted := [
            below
            for below, parent in enumerate(parents)
            if parent == row and tokens[below] in follows(codec, masks[row])
        ]:
            if chance.random() < 0.4:
                break
            row = chance.choice(drafted)
            step.append(tokens[row])
        if may_follow := follows(codec, masks[row]):
            step.append(chance.choice(may_follow))
        state.advance(step)
        committed += step
        if END in step or not step:
            break
    return num_rows


@pytest.mark.parametrize("name", staged(GRAMMARS, first=[*GRAMMARS][::3]))
def test_masks_behind_drafts_that_came_and_went_are_those_without(name: str) -> None:
    """No trace of a rejected path, of a sibling, or of a place that looks alike."""
    assert sum(play(name, random.Random(seed)) for seed in range(6)) > 10


class Counted:
    """A matcher of the library that counts what it is asked to do: tokens taken, tokens taken back, copies, masks."""

    def __init__(self, matcher: Any, counts: Counter[str]) -> None:
        self._matcher, self.counts = matcher, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> "Counted":
        self.counts["copies"] += 1
        return Counted(self._matcher.deep_copy(), self.counts)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.counts["taken"] += len(tokens)
        return int(self._matcher.try_consume_tokens(tokens))

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.counts["taken"] += len(tokens)
        return bool(self._matcher.consume_tokens(tokens))

    def rollback(self, num_tokens: int) -> bool:
        self.counts["taken back"] += num_tokens
        return bool(self._matcher.rollback(num_tokens))

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        self.counts["masks"] += 1
        self._matcher.unsafe_compute_mask_ptr(pointer, num_bytes)


def counted(options: dict[str, Any]) -> tuple[MatchedGrammar, Counter[str]]:
    """A state whose matchers count."""
    counts: Counter[str] = Counter()
    found = compiler_of(CODEC).open(SamplingParams(**options), (1,), (END,))
    assert found is not None
    made = MatchedGrammar(found._vocabulary, Counted(found._matcher, counts), (END,))  # type: ignore[arg-type]
    return made, counts


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("options", [{"json_object": True}, {"regex": "[^x]*"}], ids=["object", "expression"])
def test_a_rollback_costs_what_its_drafts_do_however_long_the_document(
    options: dict[str, Any], is_forced: bool
) -> None:
    """No step copies the history, and none takes it again, whether drafts are accepted, rejected, or both.

    is_forced  every step begins where a quote is all that may follow: what is told by a mask is told nowhere above
    """
    state, counts = counted(options)
    unit = CODEC.encode('"k": [1, {"b": null}], ', add_special_tokens=False)
    opening, (wrong,) = CODEC.encode("{", add_special_tokens=False), CODEC.encode("t", add_special_tokens=False)
    mask_of(state, CODEC, [0, *opening], (-1, 0))
    state.advance(opening)
    assert counts["copies"] <= 1
    length, num_steps = len(opening), 0
    while length < 2000:
        place = (length - len(opening)) % len(unit)
        coming = (unit * 3)[place : place + 9]
        depth = 1 + num_steps % 8
        num_right = min(num_steps % 9, depth)
        committed = unit if is_forced else coming[: num_right + 1]
        draft = [*coming[:num_right], *[wrong] * depth][:depth]
        for tokens, parents in (
            ([0, *draft], range(-1, depth)),
            ([0, *draft, draft[0], wrong, coming[0], coming[1]], [*range(-1, depth), 0, 0, 0, depth + 3]),
        ):
            before = Counter(counts)
            mask_of(state, CODEC, tokens, parents)
            spent = counts - before
            assert spent["copies"] == 0, length
            assert max(spent.values()) <= 3 * len(tokens) + 6, (length, spent)
        before = Counter(counts)
        state.advance(committed)
        spent = counts - before
        assert spent["copies"] == 0 and max(spent.values()) <= 2 * len(committed) + 6, (length, spent)
        length, num_steps = length + len(committed), num_steps + 1


def test_a_draft_behind_which_a_grammar_cannot_go_on_fails_nobody() -> None:
    """That is a failure once it is committed, as it is without drafts; until then nothing may follow that row."""
    (b, a) = (CODEC.encode(text, add_special_tokens=False)[0] for text in "ba")
    state = state_of(CODEC, grammar='start: "b"+ ("a" A)?\nA: /x/ & /y/')
    for tokens, parents in (([0, b, a], (-1, 0, 1)), ([0, b, b, a, a], (-1, 0, 1, 1, 2))):
        masks = mask_of(state, CODEC, tokens, parents)
        for row, token in enumerate(tokens):
            assert (row > 0 and token == a) != masks[row].any()
        assert a in allowed(masks[1])
    state.advance([b])
    assert mask_of(state, CODEC).any()
    state.advance([a])
    with pytest.raises(GrammarError, match="the grammar cannot go on: nothing may follow"):
        mask_of(state, CODEC, [a, b], (-1, 0))


def test_an_interrupt_amid_a_drafted_path_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C: masks of the rows are asked for again."""
    options: dict[str, Any] = {"json_schema": ROOT}
    tokens = CODEC.encode('{"value": 12, "next": []}', add_special_tokens=False)
    state, plain = state_of(CODEC, **options), state_of(CODEC, **options)
    num_calls = 0

    def interrupted(self: Any, *arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise KeyboardInterrupt
        return original(self, *arguments)

    original = matching.MatchedGrammar._behind
    with monkeypatch.context() as patched:
        patched.setattr(matching.MatchedGrammar, "_behind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mask_of(state, CODEC, [0, *tokens[:6]], range(-1, 6))
    wanted = mask_of(plain, CODEC, [0, *tokens[:6]], range(-1, 6))
    assert (mask_of(state, CODEC, [0, *tokens[:6]], range(-1, 6)) == wanted).all()
