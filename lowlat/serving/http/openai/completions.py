"""/v1/completions: prompts of text or token ids in, their continuations out."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lowlat.ipc.client import AsyncGeneration, Chunk
from lowlat.serving.http.choices import Choices
from lowlat.serving.http.errors import invalid
from lowlat.serving.http.gateway import Gateway
from lowlat.serving.http.openai.answers import Choice, ChoicesAnswer, fingerprint, seeded
from lowlat.serving.http.openai.schema import CompletionRequest, decode, unsupported
from lowlat.serving.http.openai.structured import structured_options
from lowlat.serving.http.streaming import read_body, respond

__all__ = ["completions"]

MAX_COMPLETIONS = 4096  # of one request; MAX_AT_ONCE are under way
DEFAULT_TOKENS = 16  # OpenAI's
_DECODER = msgspec.json.Decoder(CompletionRequest)


async def completions(request: Request) -> Response:
    """Continue prompts."""
    gateway: Gateway = request.app.state.gateway
    asked = decode(_DECODER, await read_body(request))
    server = await gateway.serving(asked.model)
    sampling = asked.sampling() | structured_options(asked.structured_outputs)
    sampling["max_tokens"] = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    if asked.logprobs is not None:
        sampling["logprobs"] = asked.logprobs
    prompts = _prompts(asked.prompt, server.vocab_size)
    num = asked.n or 1
    if len(prompts) * num > MAX_COMPLETIONS:
        raise invalid("n", f"n: {len(prompts)} prompts, {num} times, are more than {MAX_COMPLETIONS}")
    if asked.best_of not in (None, num):
        raise unsupported("best_of", f"{asked.best_of}; all n = {num} are returned")

    prompt_ids: list[Sequence[int]] = []
    if asked.needs_prompt_ids:
        for place, prompt in enumerate(prompts):
            prompts[place] = await gateway.client.tokenize(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = prompts

    def start(place: int) -> AsyncGeneration:
        options = seeded(sampling, place % num)
        return gateway.client.generate(prompts[place // num], cache_salt=asked.cache_salt or "", **options)

    answer = _Completion(asked, fingerprint(server), len(prompts), prompt_ids)
    return await respond(request, Choices(start, len(prompts) * num), answer, stream=bool(asked.stream))


def _prompts(given: str | list[Any], vocab_size: int) -> list[Any]:
    """The prompts in a list of their own. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    prompts: list[Any] = [given] if given and all(type(item) is int for item in given) else given
    if not 1 <= len(prompts) <= MAX_COMPLETIONS:
        raise invalid("prompt", f"prompt: {len(prompts)} prompts; 1 to {MAX_COMPLETIONS} are taken")
    for place, prompt in enumerate(prompts):
        ids = isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)
        if not isinstance(prompt, str) and not ids:
            raise invalid("prompt", f"prompt[{place}]: is neither text nor token ids")
        if ids and not 0 <= min(prompt) <= max(prompt) < vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise invalid("prompt", f"prompt[{place}]: token {wrong}; ids are 0 to {vocab_size - 1}")
    return prompts


class _Completion(ChoicesAnswer):
    """The answer to a completion."""

    NOTHING = {"text": ""}  # noqa: RUF012
    PROMPTS_IN_CHOICES = True

    def __init__(
        self, asked: CompletionRequest, fingerprint: str, num_prompts: int, prompt_ids: Sequence[Sequence[int]]
    ) -> None:
        kind = ("text_completion", "text_completion")
        super().__init__("cmpl", kind, asked, fingerprint, num_prompts, prompt_ids)
        self._logprobs = asked.logprobs is not None

    def part(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """See ChoicesAnswer."""
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None:
            return {}
        return {"text": chunk.text, "logprobs": choice.lists.take(chunk.logprobs) if chunk.logprobs else None}

    def take_part(self, choice: Choice, chunk: Chunk) -> None:
        """See ChoicesAnswer."""
        choice.content.append(chunk.text)

    def whole(self, choice: Choice) -> dict[str, Any]:
        """See ChoicesAnswer."""
        logprobs = choice.lists.take(choice.logprobs) if self._logprobs else None
        return {"text": "".join(choice.content), "logprobs": logprobs}
