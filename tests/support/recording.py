"""This module runs requests to their end, and records by request what each step computed for them."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from lowlat import Runtime, SamplingParams
from lowlat.engine.scheduling.records import Phase
from lowlat.errors import RequestError
from lowlat.graphs.program import Op
from lowlat.options.request import StepOutput

Depth = int | Callable[[int], int] | None  # S of every step, or by the number of the step
Trace = tuple[list[int], dict[int, torch.Tensor]]  # a request's tokens, and the logits [V] of each by its index


def check_invariants(runtime: Runtime) -> None:
    """Check that the books of blocks and slots balance."""
    runtime.kvcache.invariants()
    runtime.scheduler.invariants()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Have torch raise if one of its operations waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Draw a random prompt for the small models."""
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens_of(outputs: Iterable[StepOutput]) -> list[int]:
    """Join the tokens of outputs."""
    return [token for output in outputs for token in output.token_ids]


def tokens_of_six(runtime: Runtime, depth: Depth = None) -> list[list[int]]:
    """Decode six requests side by side, some with a common prefix; returns their tokens."""
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=14, ignore_eos=True)
    names = [runtime.submit(prompt_of(21 + number, seed=number % 3), sampling) for number in range(6)]
    tokens = run_all(runtime, depth)
    return [tokens[name] for name in names]


def outputs_of(runtime: Runtime) -> list[StepOutput]:
    """Step until no request runs; returns all outputs."""
    found: list[StepOutput] = []
    while runtime.busy:
        found += runtime.step()
    return found


def run_all(runtime: Runtime, depth: Depth = None, limit: int = 3000) -> dict[str, list[int]]:
    """Step until no request is left; returns the tokens by request."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for number in range(limit):
        if not runtime.busy:
            break
        for output in runtime.step(depth(number) if callable(depth) else depth):
            tokens[output.request_id] += output.token_ids
    assert not runtime.busy, f"still busy after {limit} steps"
    check_invariants(runtime)
    return dict(tokens)


def run_one(runtime: Runtime, prompt: Sequence[int], params: SamplingParams, depth: Depth = None) -> list[int]:
    """Decode one request alone; returns its tokens."""
    name = runtime.submit(prompt, params)
    return run_all(runtime, depth)[name]


class Recorder:
    """Records the target's logits for each token of tracked requests, [V] by the token's index.

    `num_accepted` counts their accepted drafts, `num_moved` those that were not first children on their whole path.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._logits = torch.empty(0)
        self.logits: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.tracked: set[str] = set()
        self.num_accepted = 0
        self.num_moved = 0
        runtime.executor.set_hook(self._after)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Submit and track a request."""
        name: str = self._runtime.submit(prompt, params)
        self.tracked.add(name)
        return name

    def stop(self) -> None:
        """Remove the hook, and wait for its copies on the executor's stream."""
        self._runtime.executor.set_hook(None)
        self._runtime.executor.synchronize()

    def _after(self, op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        for argument, name in op.writes.items():
            if name == "target.logits":
                self._logits = arguments[argument]
        if op.kind == "publish":
            self._publish(arguments)

    def _publish(self, arguments: Mapping[str, torch.Tensor]) -> None:
        names = {self._slot(name): name for name in self.tracked}
        nodes = arguments["accepted_nodes"]
        logits = self._logits.view(nodes.shape[0], -1, self._logits.shape[-1])
        for index, slot in enumerate(arguments["slots"].tolist()):
            if slot < 0 or slot not in names:
                continue
            count, length = int(arguments["commit_lens"][index]), int(arguments["lengths"][slot])
            for place, node in enumerate(nodes[index, :count].tolist()):
                self.logits[names[slot]][length - count + place] = logits[index, node].clone()
                self.num_accepted += place > 0
                self.num_moved += node != place

    def _slot(self, name: str) -> int | None:
        """Return the slot in which a request decodes, or None."""
        try:
            decodes = self._runtime.scheduler.phase(name) is Phase.DECODING
        except RequestError:
            return None
        return self._runtime.scheduler.slot(name) if decodes else None


def traced(runtime: Runtime, prompt: Sequence[int], params: SamplingParams, depth: Depth = None) -> Trace:
    """Decode one request alone; returns its tokens and the logits that each was drawn from."""
    recorder = Recorder(runtime)
    name = recorder.submit(prompt, params)
    tokens = run_all(runtime, depth)[name]
    recorder.stop()
    return tokens, recorder.logits[name]


def assert_same(found: Trace, expected: Trace) -> None:
    """Assert that tokens and the bits of their logits are equal."""
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    different = [index for index, row in expected[1].items() if not torch.equal(found[1][index], row)]
    assert not different, f"other bits for the tokens at {different}"
