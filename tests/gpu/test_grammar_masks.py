"""Masks of grammars on a GPU: draws that wait for the host, with the same tokens in every bucket and executor."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recording import prompt_of, run_all
from selection_cases import Memory, best_pairs, make_world
from tiny_grammars import Automaton, Breaking, Edges, Slow, accepts, random_edges, submit_with
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.executors.launcher import Launcher
from lowlat.kernels.sampling.sample import sample
from lowlat.kernels.sampling.select import FINITE

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 512, "block_size": 16, "prefill_chunk": 32} | {
    "device": "cuda",
    "dtype": "bfloat16",
}
WIDE, NARROW = random_edges(3, 97, num_states=5, most=70, forced=0.0), random_edges(1, 97)
MODES: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9}]
BUSHY = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A target and its draft model that the kernels run."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 4096}
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", **sizes)


def params(number: int, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True, **MODES[number % len(MODES)])


def decode(runtime: Runtime, depth: int | None, grammars: list[tuple[type[Automaton], Edges] | None]) -> list[Any]:
    """Requests side by side, some with a grammar: their tokens, and then those of one alone that has none."""
    names = []
    for number, each in enumerate(grammars):
        prompt, sampling = prompt_of(5 + 11 * number, seed=number), params(number)
        if each is None:
            names.append(runtime.submit(prompt, sampling))
        else:
            names.append(submit_with(runtime, each[0](each[1]), prompt, sampling))
    found = run_all(runtime, depth)
    alone = runtime.submit(prompt_of(9), params(1))
    return [*(found[name] for name in names), run_all(runtime, depth)[alone]]


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> Iterator[list[Any]]:
    """The tokens of each request alone, without drafts."""
    with Runtime.load(pair.target, executor="graph", **OPTIONS) as runtime:
        found = []
        for number, edges in enumerate((WIDE, None, NARROW)):
            prompt = prompt_of(5 + 11 * number, seed=number)
            if edges is None:
                name = runtime.submit(prompt, params(number))
            else:
                name = submit_with(runtime, Automaton(edges), prompt, params(number))
            found.append(run_all(runtime)[name])
        alone = runtime.submit(prompt_of(9), params(1))
        yield [*found, run_all(runtime)[alone]]
    assert accepts(WIDE, found[0]) and accepts(NARROW, found[2])


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "graph"},
        {"executor": "graph", "device_loop": True},
        {"executor": "graph", "tree": BUSHY},
        {"executor": "eager"},
        {"executor": "eager", "fuse": False},
    ],
    ids=str,
)
def test_tokens_are_the_same_everywhere(options: dict[str, Any], pair: PairPaths, expected: list[Any]) -> None:
    others = {name: value for name, value in options.items() if name != "tree"}
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True, tree=options.get("tree"))
    with Runtime.load(pair.target, config, **OPTIONS, **others) as runtime:
        for depth in (0, 3, None):
            assert decode(runtime, depth, [(Automaton, WIDE), None, (Automaton, NARROW)]) == expected
        assert decode(runtime, None, [(Slow, WIDE), None, (Slow, NARROW)]) == expected
        assert runtime.summary()["eagle_speculation"]["total_accepted_tokens"] > 0


@pytest.mark.parametrize("depth", [0, 3])
def test_requests_that_are_given_up_hold_up_no_queued_step(depth: int, pair: PairPaths, expected: list[Any]) -> None:
    """One is cancelled and one's grammar fails while a step waits after the one that runs; then all end at once."""
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True)
    with Runtime.load(pair.target, config, executor="graph", **OPTIONS) as runtime:
        runtime.speculate(depth)
        for num_steps in (2, 3, 5):
            kept = submit_with(runtime, Automaton(WIDE), prompt_of(5), params(0))
            cancelled = submit_with(runtime, Slow(NARROW), prompt_of(27, seed=2), params(2))
            failing = submit_with(runtime, Breaking(WIDE, num_steps), prompt_of(9), params(1))
            outputs = [output for _ in range(num_steps + 3) for output in runtime.step()]
            runtime.cancel(cancelled)
            while runtime.busy:
                outputs.extend(runtime.step())
            assert [t for output in outputs if output.request_id == kept for t in output.token_ids] == expected[0]
            ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
            assert ends == {kept: "length", cancelled: "cancelled", failing: "error"}
        submit_with(runtime, Automaton(NARROW), prompt_of(5), params(2))
        for _ in range(4):
            runtime.step()


def test_the_reference_executor_has_the_kernels_tokens(pair: PairPaths) -> None:
    """Greedy, where the grammar leaves a choice of few: near-ties between a few logits are rare."""
    found = []
    for executor in ("graph", "reference"):
        with Runtime.load(pair.target, executor=executor, **OPTIONS) as runtime:
            name = submit_with(runtime, Automaton(NARROW), prompt_of(20), params(0, 40))
            found.append(run_all(runtime)[name])
    assert found[0] == found[1]


def test_a_draw_waits_for_its_slot_s_masks(launcher: Launcher) -> None:
    """The kernel runs until the word in the host's memory says that the masks after it are there."""
    vocabulary, slots = 128256, 2
    world = make_world(vocabulary, [{"temperature": 0.0, "has_grammar": 1}, {"temperature": 1.0, "seed": 3}], [])
    state = {name: array.cuda() for name, array in world.state().items()}
    pinned = {name: state[name].cpu().pin_memory() for name in ("grammar_masks", "grammar_ready")}
    wanted = pinned["grammar_masks"].clone()
    pinned["grammar_masks"].zero_()
    pinned["grammar_ready"].zero_()
    logits = torch.randn(2 * slots, vocabulary, device="cuda")
    tokens = torch.zeros(slots, 2, dtype=torch.int32, device="cuda")
    masks = torch.tensor([[1, 3]] * slots, device="cuda")
    live = torch.ones(slots, 2, dtype=torch.uint8, device="cuda")
    slot_list = torch.arange(slots, dtype=torch.int32, device="cuda")

    best, memory = best_pairs(logits, FINITE, 132), Memory("cuda")

    def draw(**own: torch.Tensor) -> torch.Tensor:
        out = torch.full((slots, 2), -77, dtype=torch.int32, device="cuda")
        arguments = (logits, live, tokens, masks, slot_list)
        launcher.run(*sample(*arguments, **{**state, **own}, target_tokens=out, best=best, workspace=memory))
        return out

    expected = draw()
    arrays = {name: each.numpy() for name, each in pinned.items()}

    def host() -> None:
        time.sleep(0.3)
        arrays["grammar_masks"][...] = wanted.numpy()
        arrays["grammar_ready"][0] = int(world.lengths[0])

    thread = threading.Thread(target=host)
    thread.start()
    started = time.monotonic()
    found = draw(**pinned)
    torch.cuda.synchronize()
    waited = time.monotonic() - started
    thread.join()
    assert torch.equal(found, expected) and waited > 0.2
