"""Steps that run ahead of the host, one or a loop of them, on a fake device: the same tokens, nothing else launched."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, load_fake
from recording import check_invariants, run_all, run_one
from stages import later, wide
from tiny_models import PairPaths, make_pair

import lowlat
from lowlat import ConfigError, Runtime, RuntimeConfig, SamplingParams, SpeculativeConfig, TraceConfig
from lowlat.engine.loading.loaded import Loaded
from lowlat.engine.loading.loading import load
from lowlat.errors import DeviceError
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket
from lowlat.kernels.step.publish import LoopControl, for_condition
from lowlat.kernels.toolchain.kernel import H200, KernelCall
from lowlat.lowering.binding import Binding
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.lower import lower
from lowlat.options.request import StepOutput
from lowlat.step.state import RING_ENTRIES

DEMO = Path(lowlat.__file__).parent / "demo"
DEPTH = 3
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 160, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}
WAYS = [(False, 0), (False, 2), (True, 0), (True, 3), (True, 100)]  # loops or not, and how far the device runs ahead
Make = Callable[..., tuple[Runtime, FakeDevice]]
MODES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "repetition_penalty": 1.3, "stop_token_ids": (5, 7, 11)},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target and a head."""
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def make(pair: PairPaths) -> Make:
    """Makes a runtime that speculates, on a fake device."""

    def build(**options: Any) -> tuple[Runtime, FakeDevice]:
        config = SpeculativeConfig(model=pair.head, num_speculative_tokens=DEPTH, strict=True)
        return load_fake(pair.target, config, **{"device_loop": True, **OPTIONS, **options})

    return build


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(97) for _ in range(length)]


def steps_until(runtime: Runtime, wanted: Callable[[list[StepOutput]], bool]) -> list[StepOutput]:
    """Step until the outputs so far are enough."""
    outputs: list[StepOutput] = []
    while not wanted(outputs):
        assert runtime.busy
        outputs += runtime.step()
    return outputs


def tokens_of(outputs: list[StepOutput], name: str) -> list[int]:
    """A request's tokens."""
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


def long(max_tokens: int = 120, **others: Any) -> SamplingParams:
    """A request that ends by its length alone."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


class Script:
    """Random submits, steps and cancels, the same whatever the device does in between: it counts tokens, not steps."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.requests = [
            (
                prompt_of(rng.randrange(1, 30), number),
                SamplingParams(seed=number, max_tokens=rng.randrange(1, 40), **MODES[number % len(MODES)]),
            )
            for number in range(9)
        ]
        self.gaps = [rng.randrange(0, 30) for _ in self.requests]  # tokens between two submits
        self.cancelled = {number: rng.randrange(1, 25) for number in rng.sample(range(len(self.requests)), 3)}

    def run(self, runtime: Runtime) -> tuple[dict[int, list[int]], dict[int, str]]:
        """Tokens and the reason of the end, by the request's number."""
        names: dict[str, int] = {}
        tokens: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        gap = 0
        while len(reasons) < len(self.requests):
            while len(names) < len(self.requests) and (gap <= 0 or not runtime.busy):
                number = len(names)
                prompt, params = self.requests[number]
                names[runtime.submit(prompt, params)] = number
                tokens[number] = []
                gap = self.gaps[number]
            for output in runtime.step():
                number = names[output.request_id]
                assert number not in reasons, "an output after the end"
                tokens[number] += output.token_ids
                gap -= len(output.token_ids)
                if output.finish_reason:
                    reasons[number] = output.finish_reason
            for name, number in names.items():
                if number not in reasons and len(tokens[number]) >= self.cancelled.get(number, 1000):
                    runtime.cancel(name)
                    tokens[number].append(-1)  # anything after this fails the comparison
                    del self.cancelled[number]
            check_invariants(runtime)
        assert not runtime.busy
        return tokens, reasons


@pytest.fixture(scope="module")
def alone(pair: PairPaths) -> Callable[[int], list[list[int]]]:
    """The tokens of each request of a script, by its seed: by the plain reference executor, without speculation."""

    @cache
    def tokens(seed: int) -> list[list[int]]:
        with Runtime.load(pair.target, device="cpu", **{**OPTIONS, "max_batch": 1}) as runtime:
            return [run_one(runtime, *request) for request in Script(seed).requests]

    return tokens


@pytest.mark.second
@pytest.mark.parametrize(("device_loop", "lead", "seed"), [wide(*WAYS[1], 1), wide(*WAYS[2], 0), (*WAYS[4], 1)])
def test_any_order_gives_the_tokens_of_each_request_alone(
    device_loop: bool, lead: int, seed: int, alone: Callable[[int], list[list[int]]], make: Make
) -> None:
    runtime, device = make(device_loop=device_loop, lead=lead, seed=seed)
    with runtime:
        script = Script(seed)
        cancelled = set(script.cancelled)
        tokens, reasons = script.run(runtime)
        assert runtime.kvcache.stats().num_used == 0
        assert (device.count("loop") > 0) == device_loop
    for number, expected in enumerate(alone(seed)):
        if reasons[number] == "cancelled":
            assert number in cancelled
            assert tokens[number].pop() == -1
            assert tokens[number] == expected[: len(tokens[number])]
        else:
            assert tokens[number] == expected


def test_a_loop_runs_half_the_ring_and_the_next_one_follows(make: Make) -> None:
    runtime, device = make(device_loop=True)
    with runtime:
        runtime.submit(prompt_of(1), long(100, max_draft_tokens=0))
        run_all(runtime)
    bucket = Bucket(1, DEPTH + 1, DEPTH)
    budget = RING_ENTRIES // 2
    assert [entry for entry in device.log if entry[0] in ("loop", "step")] == [("loop", bucket, budget)] * 4
    assert device.count("ran") == 99  # the last loop ended with its slot
    assert device.count("stop") <= 1  # at the end alone, when it was over already


def test_a_loop_gives_each_step_as_it_comes_and_all_that_has_come(make: Make) -> None:
    runtime, _ = make(lead=0)
    with runtime:
        name = runtime.submit(prompt_of(9), long(40, max_draft_tokens=0))
        counts = [len(runtime.step()) for _ in range(20)]
        assert counts[-15:] == [1] * 15
        runtime.cancel(name)
    runtime, device = make(lead=100, seed=1)
    with runtime:
        runtime.submit(prompt_of(9), long(40, max_draft_tokens=0))
        several = 0
        while runtime.busy:
            before = device.head
            outputs = runtime.step()
            several = max(several, len(outputs))
            assert outputs or device.head == before
        assert several > 3


@pytest.mark.second
def test_a_new_request_stops_the_loop_and_is_prefilled_after_it(make: Make) -> None:
    runtime, device = make(max_prefill_chunks=1)
    with runtime:
        first = runtime.submit(prompt_of(9), long(60))
        outputs = steps_until(runtime, lambda found: len(found) > 4)
        assert device.count("stop") == 0
        assert not device.idle
        second = runtime.submit(prompt_of(20), long(10))
        assert device.log[-1] == ("stop",)
        place = len(device.log)
        outputs += runtime.step()
        assert [entry[0] for entry in device.log[place:]] == ["ran"]  # the step under way, then the loop is over
        outputs += steps_until(runtime, lambda found: bool(tokens_of(found, second)))
        after = [entry[0] for entry in device.log[place + 1 :]]
        assert after[:3] == ["prefill", "step", "ran"]  # no loop while a prompt is prefilled
        assert after.count("prefill") == 3
        assert device.log[-2][:2] == ("loop", Bucket(2, DEPTH + 1, DEPTH)) or after.count("loop") == 1
        tokens = run_all(runtime)
        assert len(tokens_of(outputs, first)) + len(tokens[first]) == 60


@pytest.mark.second
def test_a_full_house_keeps_looping_while_others_wait(make: Make) -> None:
    runtime, device = make(max_batch=1)
    with runtime:
        runtime.submit(prompt_of(9), long(50))
        steps_until(runtime, lambda found: len(found) > 2)
        place = len(device.log)
        runtime.submit(prompt_of(8), long(10))
        steps_until(runtime, lambda found: len(found) > 4)
        assert {entry[0] for entry in device.log[place:]} == {"ran"}
        run_all(runtime)


@pytest.mark.parametrize(("device_loop", "lead"), [wide(False, 2), wide(True, 0), (True, 30)])
@pytest.mark.second
def test_nothing_comes_after_a_cancel(device_loop: bool, lead: int, make: Make) -> None:
    runtime, device = make(device_loop=device_loop, lead=lead)
    with runtime:
        names = [runtime.submit(prompt_of(9, number), long(60, max_draft_tokens=0)) for number in range(2)]
        steps_until(runtime, lambda found: len(found) > 8)
        slot, seen = runtime.scheduler.slot(names[0]), runtime._steps.mailbox.num_seen
        assert slot is not None
        if lead:
            device.synchronize()  # it has done all that it was given
        runtime.cancel(names[0])
        check_invariants(runtime)
        outputs = runtime.step()
        assert outputs[0].finish_reason == "cancelled"
        outputs += [output for _ in range(10) for output in runtime.step()]
        assert [output.finish_reason for output in outputs if output.request_id == names[0]] == ["cancelled"]
        late = [slots for slots in device.published[seen:] if slot in slots]
        assert (len(late) > 0) == (lead > 0)  # what ran for the slot was dropped; a later command is seen in time
        again = runtime.submit(prompt_of(9, 5), long(20, max_draft_tokens=0))
        outputs = steps_until(runtime, lambda found: bool(tokens_of(found, again)))
        assert runtime.scheduler.slot(again) == slot
        run_all(runtime)


def test_the_last_one_s_cancel_ends_the_loop(make: Make) -> None:
    runtime, device = make()
    with runtime:
        name = runtime.submit(prompt_of(9), long())
        steps_until(runtime, lambda found: len(found) > 3)
        runtime.cancel(name)
        assert device.log[-1] == ("stop",)
        assert [output.finish_reason for output in runtime.step()] == ["cancelled"]
        assert not runtime.busy
        assert not device.idle  # nobody waits for it
        runtime.submit(prompt_of(9), long(10))
        assert len(run_all(runtime)) == 1
        assert device.idle


@pytest.mark.second
def test_a_smaller_bucket_replaces_the_loop(make: Make) -> None:
    runtime, device = make()
    with runtime:
        runtime.submit(prompt_of(1, 0), long(60))
        runtime.submit(prompt_of(1, 1), long(20))
        run_all(runtime)
    loops = [entry[1].batch for entry in device.log if entry[0] == "loop"]
    assert loops == sorted(loops, reverse=True)
    assert {*loops} == {1, 2}


def test_no_step_is_launched_for_nobody(make: Make) -> None:
    runtime, device = make(device_loop=False)
    with runtime:
        runtime.submit(prompt_of(1), long(30, max_draft_tokens=0))
        seen = 0
        while runtime.busy:
            seen += len(runtime.step())
            assert device.count("step") == min(seen, 29)  # always one ahead after the first token, but not at the end
        assert device.idle
        runtime.submit(prompt_of(9), long(20))
        runtime.submit(prompt_of(9, 1), long(20))
        run_all(runtime)
        assert all(device.published)


def test_a_slot_that_falls_free_is_given_away_before_the_next_step(make: Make) -> None:
    """While somebody waits in the queue, no step is launched ahead of an end that the step before has published."""
    runtime, device = make(device_loop=False, max_batch=2)
    with runtime:
        for number in range(4):
            runtime.submit(prompt_of(1, number), long(10 + number, max_draft_tokens=0))
        run_all(runtime)
    steps = [len(slots) for entry, slots in enumerate(device.published) if entry not in device.first_tokens]
    assert steps[1:-4] == [2] * (len(steps) - 5)


def test_a_depth_of_the_caller_s_own_is_each_step_s(make: Make) -> None:
    for device_loop in (False, True):
        runtime, device = make(device_loop=device_loop)
        with runtime:
            runtime.submit(prompt_of(9), long())
            steps_until(runtime, lambda found: len(found) > 2)
            assert not device.idle
            for depth in (DEPTH, 0, 1, DEPTH):
                runtime.step(depth)
                assert device.idle
                assert device.log[-1] == ("ran", Bucket(1, depth + 1, depth))
            runtime.num_speculative_tokens = 2  # the configured depth, for whoever changes it
            runtime.step()
            assert ("loop" if device_loop else "step", Bucket(1, 3, 2)) in [entry[:2] for entry in device.log[-3:]]
            runtime.num_speculative_tokens = 1
            runtime.step()
            runtime.step()
            assert device.log[-1][1] == Bucket(1, 2, 1)


@pytest.mark.second
def test_stop_strings_cut_what_ran_ahead() -> None:
    """The device goes on after a stop string that only the host sees; what it publishes then is dropped."""
    head = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=DEPTH, strict=True)
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 128}
    prompt = "The Congress shall have power to"

    def run(runtime: Runtime, params: SamplingParams) -> list[StepOutput]:
        name = runtime.submit(prompt, params)
        other = runtime.submit([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
        outputs = steps_until(runtime, lambda found: sum(output.finish_reason is not None for output in found) == 2)
        assert len(tokens_of(outputs, other)) == 40
        check_invariants(runtime)
        return [output for output in outputs if output.request_id == name]

    with Runtime.load(DEMO / "target", head, device="cpu", **sizes) as reference:
        text = "".join(output.text or "" for output in run(reference, SamplingParams(max_tokens=24)))
        params = SamplingParams(max_tokens=24, stop=(text[25:31],))
        expected = run(reference, params)
        assert expected[-1].stop_reason == text[25:31]
    runtime, _ = load_fake(DEMO / "target", head, device_loop=True, lead=100, **sizes)
    with runtime:
        found = run(runtime, params)
        assert [(o.token_ids, o.text, o.finish_reason) for o in found] == [
            (o.token_ids, o.text, o.finish_reason) for o in expected
        ]
        assert runtime.summary()["num_live"] == 0


@pytest.mark.parametrize("device_loop", [later(False), True])
def test_nan_fails_its_request_and_its_blocks_are_cleared_when_nothing_runs(device_loop: bool, make: Make) -> None:
    runtime, device = make(device_loop=device_loop)
    with runtime:
        bad, good = runtime.submit(prompt_of(9), long()), runtime.submit(prompt_of(9, 1), long(40))
        steps_until(runtime, lambda found: len(found) > 4)
        table = runtime._requests[bad].table
        device.state["v_cache.0"][table[0]] = float("nan")
        outputs = steps_until(runtime, lambda found: any(output.finish_reason for output in found))
        assert [o.request_id for o in outputs if o.finish_reason == "error"] == [bad]
        assert device.count("clear") == 1
        assert len(run_all(runtime)[good]) > 10
    place = next(number for number, entry in enumerate(device.log) if entry[0] == "clear")
    assert {*device.log[place][1:]} == {*table}
    assert (("stop",) in device.log[:place]) == device_loop


@pytest.mark.parametrize("device_loop", [False, True])
def test_a_failing_device_is_an_error_of_the_step(device_loop: bool, make: Make) -> None:
    runtime, device = make(device_loop=device_loop, fail_at=6)
    name = runtime.submit(prompt_of(1), long(max_draft_tokens=0))
    with pytest.raises(DeviceError, match="failed"):
        steps_until(runtime, lambda found: False)
    assert device.head == 6
    for _ in range(2):
        with pytest.raises(DeviceError):
            runtime.step()
    assert runtime.metrics(name).completion_tokens <= 6
    runtime.close()


def test_a_loop_that_ends_without_a_step_is_an_error(make: Make) -> None:
    runtime, device = make()
    device.start_loop = lambda bucket, budget: None  # type: ignore[method-assign]
    with runtime:
        runtime.submit(prompt_of(1), long())
        runtime.step()
        with pytest.raises(DeviceError, match="ended without a step"):
            runtime.step()


def test_the_reference_runs_nothing_ahead(pair: PairPaths) -> None:
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as runtime:
        runtime.submit(prompt_of(1), long(10))
        for number in range(10):
            assert int(runtime.executor.state["ring_head"]) == number
            runtime.step()
        assert not runtime.busy


def test_entries_from_before_a_request_are_not_its_own(make: Make) -> None:
    runtime, _ = make(device_loop=False)
    with runtime:
        runtime.submit(prompt_of(1), long())
        steps_until(runtime, lambda found: len(found) > 3)
        name = runtime.submit(prompt_of(1, 1), long())
        steps_until(runtime, lambda found: bool(tokens_of(found, name)))
        request = runtime._requests[name]
        assert request.first_entry > 3
        assert runtime._requests.is_live(request.slot, request.first_entry)
        assert not runtime._requests.is_live(request.slot, request.first_entry - 1)
        runtime.cancel(name)
        assert not runtime._requests.is_live(request.slot, request.first_entry)


def test_traces_see_one_step_at_a_time(make: Make) -> None:
    runtime, device = make(traces=TraceConfig(accept=True, tree=True))
    with runtime:
        runtime.submit(prompt_of(9), long(20))
        while runtime.busy:
            runtime.step()
            assert device.idle
    assert device.count("loop") == 0


def test_loops_need_a_device_that_has_them(pair: PairPaths) -> None:
    with pytest.raises(ConfigError, match="device_loop needs executor 'graph', and this runtime has 'reference'"):
        Runtime.load(pair.target, device="cpu", device_loop=True, **OPTIONS)


def calls_of(loaded: Loaded, bucket: Bucket, loop: LoopControl | None) -> list[KernelCall]:
    """A bucket's kernel calls, lowered over the reference's buffers."""
    executor, cpu = loaded.executor, torch.device("cpu")
    program = executor.program(bucket)
    matrices = {op.weights["weight"] for op in program.ops if op.kind == "linear"}
    weights = {**loaded.target.weights, **loaded.speculation.weights}
    buffers = {**executor.state, **executor.scratch(bucket)}
    held = DeviceWeights(weights, matrices, cpu)
    binding = Binding(program, buffers, held, H200, SharedWorkspace(cpu), loop)
    return [call for group in lower(binding) for call in group.kernel_calls]


@pytest.mark.parametrize("depth", [0, DEPTH])
def test_a_loop_s_body_is_the_step_with_another_end(depth: int, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama", hidden_size=64, intermediate_size=64, head_dim=64)
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=DEPTH, strict=True)
    sizes: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16", "block_size": 16, "prefill_chunk": 16}
    loaded = load(pair.target, config, RuntimeConfig(device="cpu", **sizes))
    bucket, word = loaded.ladder.choose(1, depth), torch.zeros(1, dtype=torch.int64)
    step = calls_of(loaded, bucket, None)
    body = calls_of(loaded, bucket, LoopControl(7, loaded.executor.state["active"], word, word))
    assert [call.kernel for call in body[:-1]] == [call.kernel for call in step[:-1]]
    assert all(call.kernel.linked for call in step)
    assert [call.kernel.linked for call in body] == [True] * (len(body) - 1) + [False]
    assert all(for_condition(call, 9) is call for call in body[:-1])
    bound = for_condition(body[-1], 9)
    assert (bound.kernel, body[-1].arguments[-1]) == (body[-1].kernel, 7)
    assert bound.arguments == (*body[-1].arguments[:-1], 9)


def test_closing_stops_a_loop(make: Make) -> None:
    runtime, device = make()
    runtime.submit(prompt_of(1), long())
    runtime.step()
    runtime.close()
    assert device.log[-2:] == [("stop",), ("close",)]
