"""This module checks the calls of a runtime: types, and limits of the loaded model.

Any thread may call the checks of a request, since the limits do not change. The scheduler makes the checks that depend
on its state: a full queue, an id in use.
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
    """Refuse arguments of `Runtime.submit` of a wrong type. Raises RequestError, which names them."""
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
    """Raise ConfigError for a draft length that is no integer, or has no bucket."""
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise ConfigError(f"num_speculative_tokens must be an integer, got {shown(depth)}")
    ladder.choose(1, depth)


def check_name(request_id: object) -> str:
    """Return a request's id if it is valid. Raises RequestError if not, whether or not such a request exists."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"a request's id (request_id) must be text, and not empty, got {shown(request_id)}")
    return request_id


def encode_prompt(
    codec: TextCodec | None, prompt: Sequence[int] | str, allow_special: bool, max_context: int, max_tokens: int
) -> Sequence[int]:
    """Encode a text; return token ids as they are. Raises RequestError for a text if there is no tokenizer."""
    if not isinstance(prompt, str):
        return prompt
    if codec is None:
        raise RequestError("a text prompt needs tokenizer.json in the model directory; give token ids")
    return codec.encode(prompt, allow_special=allow_special, max_context=max_context, max_tokens=max_tokens)


def encode_texts(codec: TextCodec | None, params: SamplingParams) -> SamplingParams:
    """Encode the parameters' draft_texts to token ids; without a tokenizer, return the parameters as they are."""
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

    max_context       the most tokens of prompt and completion
    vocab_size        token ids are below it
    eos_token_ids     the model's own end tokens
    has_text          whether there is a tokenizer, which stop strings need
    max_stop_ids      stop tokens of a request that the device can hold, the model's own included
    max_total_tokens  the most tokens of prompt and max_tokens for which the whole KV pool has capacity
    block_size        positions of a KV block, for the message
    greedy_only       whether sampling is refused: perf_mode is strict
    must_draft        whether requests without drafts are refused: perf_mode is strict, and there is a speculator
    has_prompts       whether requests may ask for logprobs of their prompts
    has_masks         whether steps draw under the masks of grammars; else requests with a grammar are refused
    num_text_tokens   the most tokens of draft_texts in a request, with an end after each; 0: draft_texts are refused
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
        """Raise RequestError for draft_texts that the runtime does not take, or whose token ids are too many."""
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
        """Raise RequestError for a request without drafts if all requests must speculate."""
        if self.must_draft and max_draft_tokens == 0:
            raise RequestError("perf_mode 'strict' speculates in every step: max_draft_tokens must be 1 or more, got 0")

    def prompt_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt as ints of the vocabulary. Raises RequestError, which names the first invalid id."""
        refused = (str, bytes, bytearray, memoryview, Mapping, Set)
        ids = plain(prompt)
        if isinstance(ids, refused) or not isinstance(ids, Iterable):
            raise RequestError(f"the prompt must be text or a sequence of token ids, got {type(prompt).__name__}")
        ids = tuple(ids)
        # all ids are checked at once first: other requests wait for their tokens during the check of a long prompt
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
