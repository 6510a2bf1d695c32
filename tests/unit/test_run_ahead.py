"""While requests decode and nobody joins, the device always has a step after the one that runs, whoever drives it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice, load_fake
from recording import run_all
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams
from lowlat.engine.launches.pace import Pace
from lowlat.ipc import Client
from lowlat.ipc.server import Server
from lowlat.serving.engine import RuntimeEngine

NUM_TOKENS = 40
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 160, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target."""
    return make_pair(tmp_path_factory.mktemp("llama"), "llama", hidden_size=64, intermediate_size=64, head_dim=64)


@pytest.fixture(params=[False, True], ids=["steps", "loops"])
def started(request: pytest.FixtureRequest, pair: PairPaths) -> Iterator[tuple[Runtime, FakeDevice]]:
    """A runtime on a device that works only when somebody waits for it."""
    runtime, device = load_fake(pair.target, None, device_loop=request.param, **OPTIONS)
    with closing(runtime):
        yield runtime, device


def check(device: FakeDevice, num_requests: int) -> None:
    """Only the last step of a request that is alone had nothing after it, and none was run for nobody."""
    assert sorted(device.first_tokens) == [number * NUM_TOKENS for number in range(num_requests)]
    assert device.head == num_requests * NUM_TOKENS
    assert {*device.last_ones} <= {(number + 1) * NUM_TOKENS - 1 for number in range(num_requests)}
    assert all(device.published)


def test_in_the_process(started: tuple[Runtime, FakeDevice]) -> None:
    runtime, device = started
    for number in range(2):
        runtime.submit([1, 2, 3 + number], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        run_all(runtime)
    check(device, 2)


def test_through_a_server(started: tuple[Runtime, FakeDevice], tmp_path: Path) -> None:
    runtime, device = started
    with Server(RuntimeEngine(runtime), None, f"ipc://{tmp_path}/s.sock") as server, Client(server.endpoint) as client:
        for number in range(2):
            chunks = list(client.generate([1, 2, 3 + number], max_tokens=NUM_TOKENS, ignore_eos=True))
            assert sum(len(chunk.token_ids) for chunk in chunks) == NUM_TOKENS
        check(device, 2)


def test_a_stop_that_nobody_could_foresee_costs_one_step(pair: PairPaths) -> None:
    """A slot that may fall free by its length is waited for where somebody wants it; a stop id's is known too late."""
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as reference:
        name = reference.submit([1, 2, 3], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        tokens = run_all(reference)[name]
    place = next(place for place in range(8, NUM_TOKENS) if tokens[place] not in tokens[:place])
    runtime, device = load_fake(pair.target, None, device_loop=False, **OPTIONS)
    with closing(runtime):
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(tokens[place],))
        name = runtime.submit([1, 2, 3], params)
        assert run_all(runtime)[name] == tokens[: place + 1]
        device.synchronize()
        assert device.published == [[0]] * (place + 1) + [[]]
        again = runtime.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert run_all(runtime)[again] == tokens[:4]


def test_the_host_sleeps_through_half_of_a_step_whose_pace_is_known() -> None:
    pace = Pace()
    ends = [0.004 * number for number in range(1, 12)]
    for end in ends[:8]:
        pace.saw("bucket", end)
        assert pace.nap_s("bucket", end) == 0.0  # not known yet
    pace.saw("bucket", ends[8])
    assert pace.nap_s("bucket", ends[8] + 0.0005) == pytest.approx(0.0015)
    assert pace.nap_s("bucket", ends[8] + 0.003) == 0.0
    assert pace.nap_s("another", ends[8]) == 0.0
    pace.saw("bucket", ends[9] + 0.0015)  # late: the next step has begun before
    assert pace.nap_s("bucket", ends[9] + 0.0015) == 0.0
    pace.saw("bucket", ends[10])
    assert pace.nap_s("bucket", ends[10]) == pytest.approx(0.002)
    for number in range(20):
        pace.saw("bucket", 1.0 + 0.0015 * number)
    assert pace.nap_s("bucket", 1.0 + 0.0015 * 19) == 0.0  # short steps are polled for
