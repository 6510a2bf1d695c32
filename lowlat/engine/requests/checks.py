"""This module checks the calls of a runtime: types, and limits of the loaded model.

Those of a request any thread may ask, for its limits do not change. The scheduler makes the checks that depend on the
moment: a full queue, an id in use.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from lowlat.errors import ConfigError, RequestError
from lowlat.options.declaration import plain, shown
from lowlat.options.request import SamplingParams
from lowlat.step.ladder import StepLadder
from lowlat.text import TextCodec

__all__ = ["RequestChecks", "check_call", "check_depth", "check_name", "encode_prompt", "encode_texts"]


def check_call(params: object, request_id: object, allow_special: object, cache_salt: object) -> None:
    """Refuse arguments of `Runtime.submit` that are of another type than it takes. Raises RequestError naming them."""
    if not isinstance(params, SamplingParams):
        found = type(params).__name__
        raise RequestError(f"params must be SamplingParams, got {found} (SamplingParams.from_options takes a dict)")
    if request_id is not None:
        check_name(request_id)
    if not isinstance(allow_special, bool):
        raise RequestError(f"allow_special must be true or false, got {shown(allow_special)}")
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be text, got {shown(cache_salt)}")


def check_depth(depth: object, ladder: StepLadder) -> None:
    """Raise ConfigError for a depth of speculation that is no integer, or has no bucket."""
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise ConfigError(f"num_speculative_tokens must be an integer, got {shown(depth)}")
    ladder.choose(1, depth)


def check_name(request_id: object) -> str:
    """A request's id. Raises RequestError for what is none, whatever was submitted."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"a request's id (request_id) must be text, and not empty, got {shown(request_id)}")
    return request_id


def encode_prompt(
    codec: TextCodec | None, prompt: Sequence[int] | str, allow_special: bool, max_context: int, max_tokens: int
) -> Sequence[int]:
    """The token ids of a text; others as they are. Raises RequestError for a text where there is no tokenizer."""
    if not isinstance(prompt, str):
        return prompt
    if codec is None:
        raise RequestError("a text prompt needs tokenizer.json in the model directory; give token ids")
    return codec.encode(prompt, allow_special=allow_special, max_context=max_context, max_tokens=max_tokens)


def encode_texts(codec: TextCodec | None, params: SamplingParams) -> SamplingParams:
    """The same parameters with named texts as token ids; they stay as they are where there is no tokenizer."""
    if codec is None or not any(isinstance(text, str) for text in params.draft_texts):
        return params
    ids = [
        tuple(codec.encode(text, add_special_tokens=False)) if isinstance(text, str) else text
        for text in params.draft_texts
    ]
    return replace(params, draft_texts=tuple(text for text in ids if text))


@dataclass(frozen=True)
class RequestChecks:
    """The limits of a loaded model.

    max_context       tokens of prompt and completion, at most
    vocab_size        token ids are below it
    eos_token_ids     the model's own end tokens
    has_text          there is a tokenizer, which stop strings need
    max_stop_ids      stop tokens of a request that the device can hold, the model's own included
    max_total_tokens  prompt and max_tokens for which the whole KV pool has room
    block_size        positions of a KV block, for the message
    greedy_only       sampling is refused: perf_mode is strict
    must_draft        so are requests without drafts: perf_mode is strict, and there is a speculator
    has_prompts       prompts may be asked for their logprobs; else requests that ask are refused
    has_masks         steps draw under the masks of grammars; else requests that have one are refused
    num_text_tokens   tokens of texts that a request may name to draft from, an end after each included; 0: none may be
    """

    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_text: bool
    max_stop_ids: int
    max_total_tokens: int
    block_size: int
    greedy_only: bool = False
    must_draft: bool = False
    has_prompts: bool = False
    has_masks: bool = False
    num_text_tokens: int = 0

    def check(self, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        """Refuse a prompt and parameters that can never be served; return the prompt as a tuple of ints.

        prompt   token ids [n], n >= 1
        Raises RequestError naming value, limit and knob.
        """
        prompt_ids = self.prompt_ids(prompt)
        if not prompt_ids:
            raise RequestError("the prompt is empty; it needs at least one token")
        total = len(prompt_ids) + params.max_tokens
        if total > self.max_context:
            raise RequestError(
                f"prompt of {len(prompt_ids)} tokens and max_tokens {params.max_tokens} exceed "
                f"{self.max_context} (max_context)"
            )
        if total > self.max_total_tokens:
            raise RequestError(
                f"prompt of {len(prompt_ids)} tokens and max_tokens {params.max_tokens} exceed "
                f"{self.max_total_tokens}, for which the KV pool has blocks of {self.block_size} positions (kv_blocks)"
            )
        if params.stop and not self.has_text:
            raise RequestError("stop strings need tokenizer.json in the model directory; use stop_token_ids")
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or {})):
            for token in ids:
                if token >= self.vocab_size:
                    raise RequestError(f"{name}: {token} is not a token id; the vocabulary has {self.vocab_size}")
        self.stop_ids(params)
        if params.grammar_option is not None and not self.has_masks:
            raise RequestError(
                f"{params.grammar_option}: the steps of this runtime draw under no grammar's masks; load it without "
                "specpv_lossless"
            )
        if params.prompt_logprobs is not None and not self.has_prompts:
            raise RequestError(
                "prompt_logprobs: this runtime keeps nothing of prompts; load it with prompt_logprobs, and not with "
                "perf_mode 'strict'"
            )
        self.check_texts(params)
        if self.greedy_only and params.temperature:
            raise RequestError(f"perf_mode 'strict' decodes greedily: temperature must be 0, got {params.temperature}")
        self.check_drafts(params.max_draft_tokens)
        return prompt_ids

    def check_texts(self, params: SamplingParams) -> None:
        """Raise RequestError for named texts where none may be, or that are too long as far as they are token ids."""
        if not params.draft_texts:
            return
        if not self.num_text_tokens:
            raise RequestError(
                "draft_texts: this runtime drafts from no texts that requests name; load it with draft_text_tokens and "
                "drafts from text (method or text_drafts 'suffix')"
            )
        if not self.has_text and any(isinstance(text, str) for text in params.draft_texts):
            raise RequestError("draft_texts need tokenizer.json in the model directory; give token ids")
        length = sum(len(text) + 1 for text in params.draft_texts if not isinstance(text, str))
        if length > self.num_text_tokens:
            raise RequestError(
                f"draft_texts of {length} tokens, an end after each, exceed {self.num_text_tokens} (draft_text_tokens)"
            )
        largest = max((max(text) for text in params.draft_texts if not isinstance(text, str)), default=0)
        if largest >= self.vocab_size:
            raise RequestError(f"draft_texts: {largest} is not a token id; the vocabulary has {self.vocab_size}")

    def check_drafts(self, max_draft_tokens: int | None) -> None:
        """Raise RequestError for a request that would not speculate where all must."""
        if self.must_draft and max_draft_tokens == 0:
            raise RequestError("perf_mode 'strict' speculates in every step: max_draft_tokens must be 1 or more, got 0")

    def prompt_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt's ids as ints of the vocabulary. Raises RequestError naming the first that is none."""
        refused = (str, bytes, bytearray, memoryview, Mapping, Set)
        ids = plain(prompt)
        if isinstance(ids, refused) or not isinstance(ids, Iterable):
            raise RequestError(f"the prompt must be text or a sequence of token ids, got {type(prompt).__name__}")
        ids = tuple(ids)
        # all at once first: a long prompt is checked while others wait for their tokens
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size):
            return ids
        ids = tuple(map(plain, ids))
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"prompt token {place} is {token!r:.80}; ids are integers from 0 to {self.vocab_size - 1}"
                )
        return ids

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens that end a request, the model's own included. Raises RequestError for too many."""
        own = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *own)))
        if len(stop_ids) > self.max_stop_ids:
            raise RequestError(
                f"{len(stop_ids)} stop tokens, the model's own {len(own)} included, exceed {self.max_stop_ids}; "
                "give fewer stop_token_ids, or ignore_eos"
            )
        return stop_ids
