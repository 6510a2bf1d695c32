"""This module makes several answers to one prompt; the prompt is prefilled once for all of them."""

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowlat.engine.sessions.session import record_of
from lowlat.errors import RequestError
from lowlat.ipc.answer import Answer
from lowlat.ipc.prompts import Prompt
from lowlat.options.declaration import check_integer
from lowlat.options.request import SamplingParams

if TYPE_CHECKING:
    from lowlat.engine.runtime import Runtime
    from lowlat.engine.stepped import SteppedRuntime

__all__ = ["answer_choices", "mean_logprob"]

MAX_CHOICES = 128
SEEDS = 1 << 63


def answer_choices(
    runtime: "Runtime",
    prompt: Prompt,
    n: int,
    best_of: int | None,
    params: SamplingParams | None,
    options: Mapping[str, Any],
) -> list[Answer]:
    """See `Runtime.choices`."""
    check_integer("n", n, 1, MAX_CHOICES, RequestError)
    count = n if best_of is None else best_of
    check_integer("best_of", count, n, MAX_CHOICES, RequestError)
    own = dict(options)
    seed, session = own.get("seed", None if params is None else params.seed), own.get("session")
    if seed is None and session is not None:
        seed = secrets.randbits(63)  # the session must record the seed of the answer that it continues
    if count > n and own.get("logprobs", None if params is None else params.logprobs) is None:
        own["logprobs"] = 0
    streams = []
    try:
        for place in range(count):
            seeded = own if seed is None else own | {"seed": (seed + place) % SEEDS}
            streams.append(runtime.stream(prompt, params, **seeded))
        answers = [stream.answer() for stream in streams]
    finally:
        for stream in streams:
            stream.close()
    places = list(range(count))
    if count > n:
        places.sort(key=lambda place: mean_logprob(answers[place]), reverse=True)
    if session is not None and seed is not None:
        said, own_seed = (*streams[0].prompt_token_ids, *answers[places[0]].token_ids), (seed + places[0]) % SEEDS

        def go_on_from(owned: "SteppedRuntime") -> None:
            record, _ = record_of(owned, session, own.get("cache_salt", ""))
            if record is not None:
                record.token_ids, record.seed = said, own_seed

        runtime.owned_call(go_on_from)
    return [answers[place] for place in places[:n]]


def mean_logprob(answer: Answer) -> float:
    """The mean logprob of an answer's tokens; -inf for an empty answer."""
    logprobs = [each.logprob for each in answer.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
