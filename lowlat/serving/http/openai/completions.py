"""This module serves /v1/completions: prompts of text or token ids in, their continuations out."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lowlat.errors import LowlatError
from lowlat.ipc.client import AsyncGeneration, Chunk
from lowlat.ipc.messages import Welcome
from lowlat.serving.http.choices import Choices
from lowlat.serving.http.errors import invalid, name_fields, of_prompt
from lowlat.serving.http.gateway import gateways_of
from lowlat.serving.http.openai.answers import Choice, ChoicesAnswer, fingerprint, seeded
from lowlat.serving.http.openai.bodies import decode, decoder_of
from lowlat.serving.http.openai.logprobs import Lists, prompt_logprobs
from lowlat.serving.http.openai.schema import (
    MAX_CHOICES,
    CompletionRequest,
    GrowingCompletionRequest,
    check_growing,
    unsupported,
)
from lowlat.serving.http.openai.structured import STRUCTURED_FIELDS, structured_options
from lowlat.serving.http.sessions import session_of
from lowlat.serving.http.streaming import read_body, respond
from lowlat.serving.http.uploads import Lines, feed, is_lines

__all__ = ["completions"]

MAX_COMPLETIONS = 4096  # completions of one request; MAX_AT_ONCE run at once
DEFAULT_TOKENS = 16  # OpenAI's
_DECODER = decoder_of(CompletionRequest)
_GROWING_DECODER = decoder_of(GrowingCompletionRequest)


async def completions(request: Request) -> Response:
    """Continue prompts, or one that is still being written."""
    session = session_of(request)
    if is_lines(request):
        return await _continue_growing(request, session)
    asked = decode(_DECODER, await read_body(request))
    _name_fields(request, asked)
    gateway = await gateways_of(request).of(asked.model)
    server = await gateway.serving(asked.model)
    sampling = _sampling(asked, server)
    prompts = _prompts(asked.prompt, server.vocab_size)
    num = _num_made(asked)
    if num > (asked.n or 1):
        sampling.setdefault("logprobs", 0)
    if len(prompts) * num > MAX_COMPLETIONS:
        raise invalid("n", f"n: {len(prompts)} prompts, {num} times, are more than {MAX_COMPLETIONS}")

    def told(place: int, error: LowlatError) -> Exception:
        return error if len(prompts) == 1 else of_prompt(error, request.scope, place // num)

    prompt_ids: list[Sequence[int]] = []
    for place, prompt in enumerate(prompts if asked.needs_prompt_ids else ()):
        try:
            prompt_ids.append(await gateway.client.tokenize(prompt) if isinstance(prompt, str) else prompt)
        except LowlatError as error:
            raise told(place * num, error) from error

    def start(place: int) -> AsyncGeneration:
        prompt = prompts[place // num]
        options = seeded(sampling | _echo_options(asked, prompt), place % num)
        return gateway.client.generate(prompt, cache_salt=asked.cache_salt or "", session=session, **options)

    answer = _Completion(asked, fingerprint(server), prompts, prompt_ids, num)
    return await respond(request, Choices(start, len(prompts) * num, told), answer, stream=bool(asked.stream))


def _name_fields(request: Request, asked: CompletionRequest) -> None:
    of_prompts = "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"
    name_fields(request, {"prompt": "prompt", "prompt_logprobs": of_prompts, **STRUCTURED_FIELDS})


async def _continue_growing(request: Request, session: str) -> Response:
    """Continue a prompt whose pieces come line by line; the answer begins when the body has ended."""
    lines = Lines(request)
    asked = decode(_GROWING_DECODER, await lines.first())
    _name_fields(request, asked)
    check_growing(asked)
    for name, given in (("best_of", asked.best_of not in (None, 1)), ("echo", bool(asked.echo))):
        if given:
            raise unsupported(name, "the prompt is still being written")
    gateway = await gateways_of(request).of(asked.model)
    server = await gateway.serving(asked.model)
    prompts = _prompts(asked.prompt, server.vocab_size) if asked.prompt else [""]
    if len(prompts) > 1:
        raise invalid("prompt", f"prompt: {len(prompts)} prompts; one can be written at a time")
    options = _sampling(asked, server)
    prompt = gateway.client.open_prompt(
        cache_salt=asked.cache_salt or "", session=session, max_prompt_tokens=asked.max_prompt_tokens, **options
    )
    generation = await feed(prompt, lines, prompts[0])
    answer = _Completion(asked, fingerprint(server), prompts, (), 1)
    return await respond(request, Choices(lambda _: generation), answer, stream=bool(asked.stream))


def _sampling(asked: CompletionRequest, server: Welcome) -> dict[str, Any]:
    """Return the sampling options of a completion's generations. Raises ApiError."""
    sampling = asked.sampling(server.advice) | structured_options(asked.structured_outputs)
    # a prompt alone takes a step, too, whose token is not shown
    sampling["max_tokens"] = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens or 1
    if asked.logprobs is not None:
        sampling["logprobs"] = asked.logprobs
    return sampling


def _num_made(asked: CompletionRequest) -> int:
    """Return how many answers to generate for a prompt. Raises ApiError for an invalid best_of."""
    num = asked.n or 1
    if asked.best_of in (None, num):
        return num
    if not num < asked.best_of <= MAX_CHOICES:
        raise invalid("best_of", f"best_of: {asked.best_of}; n = {num} to {MAX_CHOICES}")
    if asked.stream:
        raise unsupported("best_of", "which is best is known at the end; leave stream out")
    return asked.best_of


def _echo_options(asked: CompletionRequest, prompt: str | list[int]) -> dict[str, int]:
    """The options by which a prompt is given back: logprobs where they are asked for, and of token ids the texts."""
    if not asked.echo or (asked.logprobs is None and isinstance(prompt, str)):
        return {}
    return {"prompt_logprobs": max(asked.logprobs or 0, asked.prompt_logprobs or 0)}


def _prompts(given: str | list[Any], vocab_size: int) -> list[Any]:
    """The prompts in a list of their own. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    is_one = bool(given) and not isinstance(given[0], (str, list))
    prompts: list[Any] = [given] if is_one else given
    if not 1 <= len(prompts) <= MAX_COMPLETIONS:
        raise invalid("prompt", f"prompt: {len(prompts)} prompts; 1 to {MAX_COMPLETIONS} are taken")
    for place, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        param = "prompt" if is_one else f"prompt[{place}]"
        if not isinstance(prompt, list) or not prompt:
            raise invalid(param, f"{param}: is neither text nor token ids")
        if set(map(type, prompt)) != {int} or not 0 <= min(prompt) <= max(prompt) < vocab_size:
            wrong = next(token for token in prompt if type(token) is not int or not 0 <= token < vocab_size)
            shown = msgspec.json.encode(wrong).decode()
            raise invalid(param, f"{param}: token {shown:.80}; ids are 0 to {vocab_size - 1}")
    return prompts


class _Completion(ChoicesAnswer):
    """The answer to a completion."""

    NOTHING = {"text": ""}  # noqa: RUF012
    PROMPTS_IN_CHOICES = True

    def __init__(
        self,
        asked: CompletionRequest,
        fingerprint: str | None,
        prompts: Sequence[str | list[int]],
        prompt_ids: Sequence[Sequence[int]],
        num_made: int,
    ) -> None:
        self._num_best, asked = asked.n or 1, msgspec.structs.replace(asked, n=num_made)
        kind = ("text_completion", "text_completion")
        super().__init__("cmpl", kind, asked, fingerprint, len(prompts), prompt_ids)
        self._logprobs, self._num_prompt = asked.logprobs, asked.prompt_logprobs
        self._prompt_alone = asked.max_tokens == 0
        for place, choice in enumerate(self._choices if asked.echo else ()):
            prompt = prompts[place // (asked.n or 1)]
            choice.echo = prompt if isinstance(prompt, str) else ""

    def events(self, place: int, chunk: Chunk) -> bytes:
        """See `streaming.Answer`."""
        return super().events(place, self._shown(chunk))

    def take(self, place: int, chunk: Chunk) -> None:
        """See `streaming.Answer`."""
        super().take(place, self._shown(chunk))

    def _shown(self, chunk: Chunk) -> Chunk:
        """A chunk without the token that nobody asked for."""
        if not self._prompt_alone:
            return chunk
        ended = (
            None if chunk.finish_reason is None else "length" if chunk.finish_reason == "stop" else chunk.finish_reason
        )
        return msgspec.structs.replace(
            chunk, token_ids=(), text="", logprobs=None, accepted=(), finish_reason=ended, stop_reason=None
        )

    def body(self) -> dict[str, Any]:
        """See `streaming.Answer`; of each prompt's answers those with the best mean logprob, the best first."""
        body = super().body()
        if self._num_best == self._num_wanted:
            return body
        kept: list[int] = []
        for first in range(0, len(self._choices), self._num_wanted):
            own = range(first, first + self._num_wanted)
            kept += sorted(own, key=lambda place: -_mean_logprob(self._choices[place]))[: self._num_best]
        choices = [{**body["choices"][place], "index": index} for index, place in enumerate(kept)]
        return {**body, "choices": choices}

    def part(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """See ChoicesAnswer."""
        echoes = choice.echo is not None and not choice.named
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None and not echoes:
            return {}
        text, lists = chunk.text, choice.lists.take(chunk.logprobs) if chunk.logprobs else None
        if echoes:
            choice.prompt = chunk.prompt_logprobs
            before, of_prompt = self._echo(choice)
            text, lists, choice.prompt = before + text, of_prompt or lists, None
        choice.named = True
        return {"text": text, "logprobs": lists}

    def _echo(self, choice: Choice) -> tuple[str, Lists | None]:
        """The prompt's text, and the lists of its tokens where logprobs are asked for."""
        prompt, text = choice.prompt, choice.echo or ""
        if prompt is None or choice.echo is None:
            return text, None
        lists = None if self._logprobs is None else choice.lists.take_prompt(prompt, self._logprobs)
        return text or b"".join(prompt.prompt_texts()).decode("utf-8", "replace"), lists

    def take_part(self, choice: Choice, chunk: Chunk) -> None:
        """See ChoicesAnswer."""
        choice.content.append(chunk.text)

    def whole(self, choice: Choice) -> dict[str, Any]:
        """See ChoicesAnswer."""
        before, lists = self._echo(choice)
        if self._logprobs is not None:
            behind = choice.lists.take(choice.logprobs)
            lists = behind if lists is None else {name: lists[name] + behind[name] for name in lists}
        fields: dict[str, Any] = {"text": before + "".join(choice.content), "logprobs": lists}
        if self._num_prompt is not None and choice.prompt is not None:
            fields["prompt_logprobs"] = prompt_logprobs(choice.prompt, self._num_prompt)
        return fields


def _mean_logprob(choice: Choice) -> float:
    return sum(each.logprob for each in choice.logprobs) / max(1, len(choice.logprobs))
