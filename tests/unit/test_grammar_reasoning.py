"""Requests that reason first, whose reasoning ends amid drafts that are accepted: the grammar holds from there on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from grammars import HARMONY
from text_tokenizers import byte_level, write_directory
from tiny_models import make_target
from tokenizers import AddedToken, Tokenizer
from unit.test_lossless import OPTIONS

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.options.request import StepOutput

CHOICES = ("yes, it is", "no, it is not")


class Way(NamedTuple):
    """How a model's answer says where its document begins.

    added   tokens of the tokenizer, besides
    before  the text by which the prompt ends
    last    two tokens of the reasoning, the second of which ends it
    """

    added: tuple[str, ...]
    before: str
    last: tuple[str, str]


WAYS = {
    "thought": Way(("<think>", "</think>"), "<think>", ("m", "</think>")),
    "harmony": Way(("final", *HARMONY), "<|start|>assistant<|channel|>", ("final", "<|message|>")),
}


class Reasoning:
    """A target whose reasoning is short, and prompts from which its end is drafted.

    Two tokens are made likely, and the seed is one at which they come in turn; the prompt has them, and a document
    after them, which text drafts.
    """

    def __init__(self, directory: Path, way: Way) -> None:
        tokenizer = Tokenizer.from_str(byte_level().to_str())
        special = way.before != "<think>"
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in way.added])
        size = tokenizer.get_vocab_size() + 5
        make_target(directory, "llama", gain=0.3, num_hidden_layers=1, vocab_size=size, eos_token_id=[1])
        self.directory, self.way = write_directory(directory, tokenizer), way
        with self.runtime(None) as runtime:
            assert runtime.codec is not None
            text = f"{''.join(way.last)}{CHOICES[0]} {way.before}"
            self.prompt = runtime.codec.encode(text, add_special_tokens=False, allow_special=True)
            ids = [runtime.codec.token_id(token) for token in way.last]
            self.ids = [self.prompt[0] if token is None else token for token in ids]
            bias = dict(zip(self.ids, (100.0, 99.0), strict=True))
            for seed in range(60):
                own = SamplingParams(temperature=4.0, seed=seed, logit_bias=bias, max_tokens=40, choice=CHOICES)
                self.params = own
                self.alone = self.tokens(self.run(runtime))
                if self.alone[:2] == self.ids:
                    return
        pytest.fail("no seed ends the reasoning so")

    def runtime(self, speculative: SpeculativeConfig | None) -> Runtime:
        return Runtime.load(self.directory, speculative, **{**OPTIONS, "max_context": 128})

    def run(self, runtime: Runtime) -> list[StepOutput]:
        runtime.submit(self.prompt, self.params)
        return [output for _ in iter(lambda: runtime.busy, False) for output in runtime.step()]

    @staticmethod
    def tokens(outputs: list[StepOutput]) -> list[int]:
        return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="module", params=WAYS)
def reasoning(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reasoning]:
    """One of the ways."""
    yield Reasoning(tmp_path_factory.mktemp(request.param), WAYS[request.param])


@pytest.mark.parametrize(
    ("options", "adaptive"), [({"method": "ngram", "prompt_lookup_min": 1}, False), ({"method": "suffix"}, True)]
)
def test_a_grammar_holds_where_reasoning_ends_amid_accepted_drafts(
    reasoning: Reasoning, options: dict[str, Any], adaptive: bool
) -> None:
    """The step that accepts the end of the reasoning accepts what the grammar forces after it, or draws by it."""
    speculative = SpeculativeConfig(num_speculative_tokens=5, adaptive_width=adaptive, strict=True, **options)
    with reasoning.runtime(speculative) as runtime:
        outputs = reasoning.run(runtime)
        assert reasoning.tokens(outputs) == reasoning.alone and outputs[-1].finish_reason == "stop"
        assert runtime.codec is not None
        document = runtime.codec.decode(reasoning.alone[2:]).lstrip("\n")  # which may part it from the thought
        assert document in CHOICES
        end = reasoning.ids[1]
        (step,) = (output for output in outputs if end in output.token_ids)
        if not adaptive:
            assert step.num_accepted > step.token_ids.index(end) and step.token_ids[-1] != end
