"""A step that an exception breaks off, wherever it is: the runtime says so from then on; no token is lost silently."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fake_device import load_fake
from recording import run_all
from stages import later, wide
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.mailbox.mailbox import Mailbox
from lowlat.engine.requests.request import Request
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.errors import DeviceError, LowlatError

SIZES: dict[str, Any] = {"max_batch": 2, "max_context": 64, "block_size": 4, "prefill_chunk": 8}
REQUESTS = {
    "greedy": ([5, 6, 7, 8] * 3, SamplingParams(max_tokens=12)),
    "sampled": ([9, 2, 4], SamplingParams(max_tokens=12, temperature=1.0, seed=3)),
}
TREE = ((0,), (1,), (0, 0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


def load(pair: PairPaths) -> Runtime:
    """A runtime with a draft model and a tree, whose accepted nodes' KV is moved."""
    draft = SpeculativeConfig(model=pair.head, num_speculative_tokens=2, tree=TREE, strict=True)
    return Runtime.load(pair.target, draft, device="cpu", **SIZES)


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> dict[str, list[int]]:
    """The tokens of a runtime that nothing disturbs."""
    with load(pair) as runtime:
        for name, (prompt, params) in REQUESTS.items():
            runtime.submit(prompt, params, request_id=name)
        return run_all(runtime)


class Breaking:
    """A runtime with two requests, stepped to where the next step prefills or decodes; then one is broken off."""

    def __init__(self, pair: PairPaths, num_steps: int) -> None:
        self.runtime = load(pair)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        for name, (prompt, params) in REQUESTS.items():
            self.runtime.submit(prompt, params, request_id=name)
        for _ in range(num_steps):
            for output in self.runtime.step():
                self.tokens[output.request_id] += output.token_ids
        self.num_operations = 0

    def break_at(self, place: int, error: type[BaseException]) -> bool:
        """Break the next step off after an operation; False where it has no more so many."""

        def hook(*_: Any) -> None:
            self.num_operations += 1
            if self.num_operations == place:
                raise error("amid a step")

        self.runtime.executor.set_hook(hook)
        try:
            self.runtime.step()
        except error:
            return True
        return False

    def check(self, expected: dict[str, list[int]]) -> None:
        """The runtime says what it is, and all that it gave before is right."""
        runtime = self.runtime
        assert runtime.busy
        calls: tuple[Any, ...] = (
            runtime.step,
            lambda: runtime.submit([1]),
            lambda: runtime.cancel("greedy"),
            lambda: runtime.speculate(0),
            lambda: runtime.set_draft_limit("greedy", 0),
        )
        for call in calls:
            with pytest.raises(DeviceError, match="interrupted a change"):
                call()
        for name, whole in expected.items():
            assert self.tokens[name] == whole[: len(self.tokens[name])]
            assert runtime.metrics(name).finish_reason == "error"
        assert runtime.summary()["memory"]
        runtime.close()
        with pytest.raises(LowlatError, match="closed"):
            runtime.step()


@pytest.mark.parametrize(
    ("error", "num_steps", "every"),
    [
        later(KeyboardInterrupt, 5, 7),  # a decode step of both
        (RuntimeError, 2, 9),  # a prompt's chunk, and its first token
        wide(RuntimeError, 5, 3),
        wide(KeyboardInterrupt, 2, 4),
    ],
)
def test_no_token_is_lost_silently(
    error: type[BaseException], num_steps: int, every: int, pair: PairPaths, expected: dict[str, list[int]]
) -> None:
    """The requests of a runtime next to it, of the same files, go on as if nothing had happened."""
    neighbour = load(pair)
    for name, (prompt, params) in REQUESTS.items():
        neighbour.submit(prompt, params, request_id=name)
    place = 1
    while (broken := Breaking(pair, num_steps)).break_at(place, error):
        broken.check(expected)
        place += every
    broken.runtime.close()
    assert place > broken.num_operations > 30
    assert run_all(neighbour) == expected
    neighbour.close()


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Mailbox, "read", "step"),
        (Request, "take", "step"),
        (Mailbox, "poll", "step"),
        (Scheduler, "enqueue", "submit"),
        (Mailbox, "cancel", "cancel"),
    ],
)
def test_the_hosts_part_is_broken_off(
    owner: Any, name: str, call: str, pair: PairPaths, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when a part of a change is done."""
    broken = Breaking(pair, 5)
    known = getattr(owner, name)

    def interrupted(*arguments: Any, **options: Any) -> None:
        known(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        arguments: dict[str, Any] = {"submit": ([1], SamplingParams(max_tokens=1)), "cancel": ("greedy",)}
        getattr(broken.runtime, call)(*arguments.get(call, ()))
    if call == "cancel":
        del broken.tokens["greedy"]
    broken.check(expected)


@pytest.mark.parametrize("looping", [False, True], ids=["steps", "loops"])
def test_ctrl_c_while_a_device_is_waited_for_loses_nothing(
    looping: bool, pair: PairPaths, expected: dict[str, list[int]]
) -> None:
    """The next step goes on, with what was to be returned: a cancelled request's end, too."""
    draft = SpeculativeConfig(model=pair.head, num_speculative_tokens=2, tree=TREE, strict=True)
    runtime, device = load_fake(pair.target, draft, device_loop=looping, seed=1, **SIZES)
    known: dict[str, Any] = {name: getattr(device, name) for name in ("wait_published", "wait_loop")}
    waits: list[int] = []

    def waiting(name: str) -> Any:
        def wait(count: int) -> Any:
            waits.append(count)
            if len(waits) % 3:
                raise KeyboardInterrupt
            return known[name](count)

        return wait

    for name in known:
        setattr(device, name, waiting(name))
    for name, (prompt, params) in REQUESTS.items():
        runtime.submit(prompt, params, request_id=name)
    gone = runtime.submit([1], SamplingParams(max_tokens=2))
    runtime.cancel(gone)
    tokens, reasons = defaultdict[str, list[int]](list), dict[str, Any]()
    while runtime.busy:
        try:
            outputs = runtime.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            reasons[output.request_id] = output.finish_reason
    assert len(waits) > 6 and {name: tokens[name] for name in REQUESTS} == expected
    assert reasons == {**dict.fromkeys(REQUESTS, "length"), gone: "cancelled"}
    runtime.close()


def test_a_refusal_breaks_nothing(pair: PairPaths, tmp_path: Path) -> None:
    with load(pair) as runtime:
        name = runtime.submit([1, 2], SamplingParams(max_tokens=3))
        for call in (
            lambda: runtime.submit([1], request_id=name),
            lambda: runtime.submit([1] * 200),
            lambda: runtime.step(7),
            lambda: runtime.cancel("nobody"),
        ):
            with pytest.raises(LowlatError):
                call()

        def ids() -> Any:
            yield 1
            raise ValueError("the caller's own")

        with pytest.raises(ValueError, match="own"):
            runtime.submit(ids())
        assert len(run_all(runtime)[name]) == 3
