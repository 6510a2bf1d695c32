"""This module makes the requests of a check: all settings, grammars, shared prefixes, turns of sessions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from typing import Any

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.options.request import SamplingParams

__all__ = [
    "GRAMMARS",
    "SETTINGS",
    "Conversation",
    "Request",
    "asked",
    "conversation",
    "conversations",
    "prefixes",
    "prompt_ids",
]

PREFIX_TOKENS = 8  # tokens of an answer after a shared prefix, and of a session's turn
ADDED_TOKENS = 4  # tokens that a session's next turn adds
ANSWERED: dict[str, Any] = {"max_tokens": PREFIX_TOKENS, "ignore_eos": True, "temperature": 1.0}

# sampling settings; each prompt is tried with all of them
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 17},
    "cut": {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "seed": 5},
    "penalised": {"temperature": 0.6, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 3},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json_object": True},
    "regex": {"regex": r"[A-Za-z ,]{5,60}\.", "temperature": 0.7, "seed": 11},
}


@dataclass(frozen=True)
class Request:
    """A prompt with its sampling parameters.

    prompt  token ids
    """

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Conversation:
    """A session: its first turn, and the token ids that its next turn and its fork's next turn add.

    answer  the plain answer to the first turn
    """

    first: Request
    answer: tuple[int, ...]
    added: tuple[int, ...]
    added_to_fork: tuple[int, ...]

    def turn(self, name: str, history: Sequence[int]) -> Request:
        """Return the turn after a history of prompt and answer: `next` of the session, `fork` of its fork."""
        added = self.added if name == "next" else self.added_to_fork
        return Request(f"{self.first.name}, {name} turn", (*history, *added), self.first.params)

    @property
    def turns(self) -> tuple[Request, Request]:
        """Return the next turn and the fork's, after the plain answer."""
        history = (*self.first.prompt, *self.answer)
        return self.turn("next", history), self.turn("fork", history)


def prompt_ids(runtime: Runtime, prompt: Sequence[int] | str) -> tuple[int, ...]:
    """Return a prompt's token ids. Raises ConfigError for a text without a tokenizer."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    if runtime.codec is None:
        raise ConfigError("prompts are texts, and the target has no tokenizer.json: give a .json file of token ids")
    return tuple(runtime.codec.encode(prompt))


def asked(runtime: Runtime, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[Request]:
    """Make requests of each prompt in each setting, and of the first prompt under grammars, if these are available."""
    for place, ids in enumerate(prompts):
        for name, setting in SETTINGS.items():
            yield Request(f"prompt {place}, {name}", ids, SamplingParams(max_tokens=max_tokens, **setting))
    if runtime.codec is None or not runtime.checks.has_masks or find_spec("llguidance") is None:
        return
    for name, setting in GRAMMARS.items():
        yield Request(f"prompt 0, {name}", prompts[0], SamplingParams(max_tokens=max_tokens, **setting))


def _whole_chunks(runtime: Runtime, beyond: int, most: int) -> int:
    """Return the chunks of a prompt, at most `most`, that leave `beyond` tokens and an answer of the context."""
    room = runtime.geometry.max_context - PREFIX_TOKENS - beyond
    return min(most, room // runtime.config.prefill_chunk)


def prefixes(runtime: Runtime, ids: Sequence[int]) -> Iterator[Request]:
    """Make prefixes of two long prompts, which end at each position of a KV block after the last complete chunk.

    ids  tokens to draw them from
    The prompts differ only in their first chunk, so that chunks of equal text follow unequal ones.
    """
    config = runtime.config
    chunks = _whole_chunks(runtime, config.block_size, 2)
    if chunks < 1:
        return
    longest = chunks * config.prefill_chunk + config.block_size
    drawn = [Random(seed).choices(ids, k=longest) for seed in range(2)]
    drawn[1][config.prefill_chunk :] = drawn[0][config.prefill_chunk :]
    for length in range(longest, longest - config.block_size, -1):
        prompt = tuple(drawn[length % 2][:length])
        yield Request(f"{length} tokens of a prompt", prompt, SamplingParams(seed=length, **ANSWERED))


def conversations(runtime: Runtime, ids: Sequence[int]) -> Iterator[Request]:
    """Make first turns of sessions: one ends just after a complete chunk, the other's answer completes one.

    ids  tokens to draw them from
    """
    chunk = runtime.config.prefill_chunk
    for extra in (1, chunk - PREFIX_TOKENS // 2):
        if _whole_chunks(runtime, extra + PREFIX_TOKENS + ADDED_TOKENS, 1) < 1:
            return
        prompt = tuple(Random(extra).choices(ids, k=chunk + extra))
        yield Request(f"a session of {len(prompt)} tokens", prompt, SamplingParams(seed=extra, **ANSWERED))


def conversation(first: Request, answer: tuple[int, ...], ids: Sequence[int]) -> Conversation:
    """Make a session of its first turn and the plain answer to it; `ids` as in `conversations`."""
    added = [tuple(Random(seed).choices(ids, k=ADDED_TOKENS)) for seed in range(2)]
    return Conversation(first, answer, *added)
