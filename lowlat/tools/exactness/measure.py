"""This module checks every answer of a user's own pair against the same request decoded alone without drafts.

A plain runtime (one slot, no speculation, no shared prefixes) answers each request first. Then a runtime that
speculates answers the same requests at each draft length, beside neighbours, paused between steps, after a shared
prefix, in sessions that fork or come from files, and at chosen draft lengths. Answers must be equal token for token.
Bits are lossless, so this holds for sampled requests with a seed as for greedy ones.
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.options.speculative import SpeculativeConfig
from lowlat.tools.exactness.decode import Meddler, cancelling, decode, pausing
from lowlat.tools.exactness.report import Exactness, Sweep
from lowlat.tools.exactness.requests import Conversation, Request, asked, conversation, conversations, prefixes
from lowlat.tools.exactness.requests import prompt_ids as ids_of

__all__ = ["BATCH", "Load", "measure_exactness"]

BATCH = 4  # slots of the runtime that speculates
FORKED, RESTORED, CHOSEN = "in sessions that fork", "in sessions from files", "with chosen draft lengths"
Load = Callable[..., Runtime]
Answers = dict[str, tuple[int, ...]]


def measure_exactness(
    target: Path,
    speculative: SpeculativeConfig,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_tokens: int,
    load: Load,
    report: Callable[[Sweep], None] | None = None,
    **options: Any,
) -> Exactness:
    """Decode the prompts plainly and in every other way, and compare.

    speculative  has the longest draft length, `num_speculative_tokens`; shorter ones are tried, too
    prompts      texts, or lists of token ids
    max_tokens   the most tokens of an answer
    load         load(target, speculative, max_context, **options) makes a runtime
    report       is called with each sweep when it has ended
    options      options of the runtimes, for instance device
    Raises ConfigError for a pair that cannot be loaded, LowlatError for a request that fails.
    """
    with load(target, None, None, max_batch=1, prefix_reuse=False, **options) as runtime:
        prompt_ids = [ids_of(runtime, prompt) for prompt in prompts]
        requests = list(asked(runtime, prompt_ids, max_tokens))
        drawn_from = [token for ids in prompt_ids for token in ids]
        shared = list(prefixes(runtime, drawn_from))
        plain = {request.name: _alone(runtime, request) for request in (*requests, *shared)}
        talks = [
            conversation(first, _alone(runtime, first), drawn_from) for first in conversations(runtime, drawn_from)
        ]
        for talk in talks:
            plain[talk.first.name] = talk.answer
            plain |= {turn.name: _alone(runtime, turn) for turn in talk.turns}
    groups = [requests[place : place + BATCH] for place in range(0, len(requests), BATCH)]

    def add(sweep: Sweep) -> None:
        found.sweeps.append(sweep)
        if report is not None:
            report(sweep)

    depth = speculative.num_speculative_tokens
    fixed = replace(speculative, strict=True)
    with tempfile.TemporaryDirectory(prefix="lowlat-exactness-") as scratch:
        files = [Path(scratch) / f"{place}.session" for place in range(len(talks))]
        with load(target, fixed, None, max_batch=BATCH, **options) as runtime:
            found = Exactness(str(runtime.device_choice.device), runtime.device_choice.executor, runtime.numerics)
            for length in range(depth + 1):
                runtime.speculate(length)
                add(_run(runtime, f"draft length {length}", [[request] for request in requests], plain))
            add(_run(runtime, "with neighbours", groups, plain))
            add(_run(runtime, "with neighbours that are cancelled", groups, plain, cancelling))
            add(_run(runtime, "paused between steps", groups, plain, pausing))
            add(_run(runtime, "after a shared prefix", [[request] for request in shared], plain))
            add(_forked(runtime, list(zip(talks, files, strict=True)), plain))
        with load(target, fixed, None, max_batch=BATCH, **options) as runtime:
            add(_restored(runtime, list(zip(talks, files, strict=True)), plain))
    try:
        with load(target, replace(fixed, adaptive_width=True), None, max_batch=BATCH, **options) as runtime:
            add(_run(runtime, CHOSEN, groups, plain))
    except ConfigError as error:
        add(Sweep(CHOSEN, skipped=str(error)))
    return found


def _alone(runtime: Runtime, request: Request) -> tuple[int, ...]:
    (answer,) = decode(runtime, "plain", [request]).values()
    return answer


def _run(
    runtime: Runtime,
    name: str,
    groups: Iterable[Sequence[Request]],
    plain: Answers,
    meddle: Meddler | None = None,
) -> Sweep:
    sweep = Sweep(name)
    for group in groups:
        sweep.compare(runtime, decode(runtime, name, group, meddle=meddle), plain)
    return sweep


def _forked(runtime: Runtime, talks: Sequence[tuple[Conversation, Path]], plain: Answers) -> Sweep:
    """Decode first turns, save and fork the sessions, and decode the next turns of sessions and forks."""
    sweep = Sweep(FORKED, skipped=None if talks else "max_context has no room for a chunk and a turn after it")
    for number, (talk, file) in enumerate(talks):
        session = runtime.session(f"exactness-{number}")
        sweep.compare(runtime, decode(runtime, FORKED, [talk.first], session=session), plain)
        session.save(file)
        twin = session.fork()
        turn = talk.turn("next", session.token_ids)
        sweep.compare(runtime, decode(runtime, FORKED, [turn], session=session), plain)
        turn = talk.turn("fork", twin.token_ids)
        sweep.compare(runtime, decode(runtime, FORKED, [turn], session=twin), plain)
    return sweep


def _restored(runtime: Runtime, talks: Sequence[tuple[Conversation, Path]], plain: Answers) -> Sweep:
    """Decode the next turns of sessions that another runtime saved after their first turns."""
    sweep = Sweep(RESTORED, skipped=None if talks else "no session was saved")
    for talk, file in talks:
        session = runtime.load_session(file)
        turn = talk.turn("next", session.token_ids)
        sweep.compare(runtime, decode(runtime, RESTORED, [turn], session=session), plain)
    return sweep
