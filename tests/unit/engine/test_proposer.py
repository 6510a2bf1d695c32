"""The interface between steps and a source of proposals: what a source is asked, and what of its answers is kept."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fake_device import FakeDevice, load_fake
from recording import run_all
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.drafting.proposer import Proposer, StepParts
from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.engine.requests.request import Request
from lowlat.engine.steps import steps
from lowlat.graphs import Bucket

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 64, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}
PROMPTS = {"short": [5, 6, 7], "long": [3, 1, 4, 1, 5, 9, 2, 6] * 3}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, max_draft_tokens=0)
DEPTH = 2


class Counting(Proposer):
    """Proposes nothing, counts what it is asked, and lets no step run ahead."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self.prefilled: Counter[str] = Counter()
        self.judged: Counter[str] = Counter()
        self.depths: list[int] = []

    def prefill(self, request: Request, start: int, count: int) -> None:
        assert start == self.prefilled[request.request_id]
        self.prefilled[request.request_id] += count

    def next_step(self, depth: int) -> tuple[Bucket, int | None]:
        assert not self.parts.launches.in_flight.under_way
        self.depths.append(depth)
        return self.parts.scheduler.ladder.choose(2, 0), 1

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        return 0

    def committed(self, request: Request, publication: SlotPublication) -> SlotPublication | None:
        assert self.parts.slots[publication.slot] is request
        self.judged[request.request_id] += 1
        return publication

    def report(self) -> dict[str, Any]:
        return {"counting": {"num_steps": len(self.depths)}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", hidden_size=64, intermediate_size=64, head_dim=64)


@pytest.fixture(params=[False, True], ids=["steps", "loops"])
def started(
    request: pytest.FixtureRequest, pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Runtime, FakeDevice]]:
    """A runtime that hands over the counting proposer, on a fake device."""
    monkeypatch.setattr(steps, "make_proposer", lambda loaded, parts: Counting(parts))
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=DEPTH, strict=True)
    runtime, device = load_fake(pair.target, config, device_loop=request.param, **OPTIONS)
    with closing(runtime):
        yield runtime, device


def test_steps_do_as_their_proposer_says(started: tuple[Runtime, FakeDevice], pair: PairPaths) -> None:
    runtime, device = started
    for name, prompt in PROMPTS.items():
        runtime.submit(prompt, PARAMS, request_id=name)
    tokens = run_all(runtime)
    proposer: Any = runtime._steps.proposer
    assert proposer.prefilled == {name: len(prompt) for name, prompt in PROMPTS.items()}
    assert proposer.judged == dict.fromkeys(PROMPTS, PARAMS.max_tokens)  # a token a step
    assert {*proposer.depths} == {DEPTH}
    assert runtime.summary()["counting"] == {"num_steps": len(proposer.depths)}
    launched = [entry for entry in device.log if entry[0] in ("step", "loop")]
    assert {entry[1] for entry in launched} == {Bucket(2, 1, 0)}
    assert len(launched) == len(proposer.depths) and device.head == len(launched) + len(PROMPTS)  # none ran ahead
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as reference:
        for name, prompt in PROMPTS.items():
            reference.submit(prompt, PARAMS, request_id=name)
        assert run_all(reference) == tokens
