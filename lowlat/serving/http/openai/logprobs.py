"""This module shows logprobs in the two shapes that OpenAI has for them, and those of prompts in vLLM's."""

from collections.abc import Sequence
from typing import Any

from lowlat.errors import RequestError
from lowlat.ipc.messages import TokenLogprob
from lowlat.ipc.prompt_logprobs import PromptLogprob, PromptLogprobs

__all__ = ["CompletionLogprobs", "Lists", "chat_logprobs", "prompt_logprobs"]

MAX_PROMPT_VALUES = 1 << 18  # logprobs of a prompt, likeliest ones included; making them delays other callers
Lists = dict[str, list[Any]]


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The shape of chats: an entry for each token of the answer, those that mark its parts included."""
    return {"content": [_entry(one) for one in logprobs], "refusal": None}


def _entry(one: TokenLogprob) -> dict[str, Any]:
    own, *others = _texts(one)
    top = [_token(text, logprob) for (_, logprob), text in zip(one.top, others, strict=True)]
    return {**_token(own, one.logprob), "top_logprobs": top}


def _token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _shown(text), "logprob": logprob, "bytes": list(text)}


class CompletionLogprobs:
    """The shape of completions: parallel lists; `text_offset` counts characters of the completion."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_continued = 0  # bytes that continue a character

    def take(self, logprobs: Sequence[TokenLogprob]) -> Lists:
        """The lists for more tokens."""
        lists = self._lists()
        for one in logprobs:
            own, *others = _texts(one)
            top = {_shown(text): logprob for (_, logprob), text in zip(one.top, others, strict=True)}
            self._add(lists, own, one.logprob, {_shown(own): one.logprob} | top)
        return lists

    def take_prompt(self, prompt: PromptLogprobs, num_top: int) -> Lists:
        """The lists for a prompt, whose first token has no logprob. Raises RequestError for one that is too long."""
        _check_size(prompt, num_top)
        lists, tokens = self._lists(), prompt.prompt()
        for token, one in zip(tokens, prompt, strict=True):
            if one is None:
                first = str(token).encode() if prompt.texts is None else prompt.texts.get(token, b"")
                self._add(lists, first, None, None)
                continue
            own, *others = _texts(one)
            top = {_shown(text): value for (_, value), text in zip(one.top[:num_top], others, strict=False)}
            self._add(lists, own, one.logprob, {_shown(own): one.logprob} | top)
        return lists

    def _lists(self) -> Lists:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(self, lists: Lists, text: bytes, logprob: float | None, top: dict[str, float] | None) -> None:
        values = (_shown(text), logprob, top, self._num_bytes - self._num_continued)
        for entries, value in zip(lists.values(), values, strict=True):
            entries.append(value)
        self._num_bytes += len(text)
        self._num_continued += sum(0x80 <= byte < 0xC0 for byte in text)


def prompt_logprobs(prompt: PromptLogprobs, num_top: int) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each token of a prompt itself and the likeliest ones by id; None for the first.

    Raises RequestError for a prompt that is too long.
    """
    _check_size(prompt, num_top)
    return [None if one is None else _by_id(one, num_top) for one in prompt]


def _by_id(one: PromptLogprob, num_top: int) -> dict[str, dict[str, Any]]:
    texts = _texts(one)
    ranked = [(one.token_id, one.logprob, one.rank)]
    ranked += [(token, logprob, place + 1) for place, (token, logprob) in enumerate(one.top[:num_top])]
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": _shown(text)}
        for (token, logprob, rank), text in zip(ranked, texts, strict=False)
    }


def _check_size(prompt: PromptLogprobs, num_top: int) -> None:
    if len(prompt) * (1 + num_top) > MAX_PROMPT_VALUES:
        raise RequestError(
            f"prompt_logprobs: those of {len(prompt)} tokens of a prompt with {num_top} likeliest ones each are more "
            f"than {MAX_PROMPT_VALUES} over HTTP; ask for fewer, or read them by lowlat.ipc.Client"
        )


def _texts(one: TokenLogprob | PromptLogprob) -> Sequence[bytes]:
    """Bytes of the token and of its alternatives; without a tokenizer, their ids."""
    if one.texts is not None:
        return one.texts
    return [str(token).encode() for token in (one.token_id, *(token for token, _ in one.top))]


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace")
