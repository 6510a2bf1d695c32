"""Logarithmic probabilities in the two shapes that OpenAI has for them."""

from collections.abc import Sequence
from typing import Any

from lowlat.ipc.messages import TokenLogprob

__all__ = ["CompletionLogprobs", "chat_logprobs"]


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
        self._num_continued = 0  # bytes that go on a character

    def take(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The lists for more tokens."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            own, *others = _texts(one)
            lists["tokens"].append(_shown(own))
            lists["token_logprobs"].append(one.logprob)
            top = {_shown(text): logprob for (_, logprob), text in zip(one.top, others, strict=True)}
            lists["top_logprobs"].append({_shown(own): one.logprob} | top)
            lists["text_offset"].append(self._num_bytes - self._num_continued)
            self._num_bytes += len(own)
            self._num_continued += sum(0x80 <= byte < 0xC0 for byte in own)
        return lists


def _texts(one: TokenLogprob) -> Sequence[bytes]:
    """Bytes of the token and of its alternatives; without a tokenizer, their ids."""
    if one.texts is not None:
        return one.texts
    return [str(token).encode() for token in (one.token_id, *(token for token, _ in one.top))]


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace")
