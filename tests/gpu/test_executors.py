"""The eager and the graph executor against the reference and each other, on small models and the bundled pair."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep import Lockstep
from quantised_layers import quantise_target, store_kv_scales
from recording import Recorder, assert_same, check_invariants, prompt_of, run_all, traced
from safetensors.torch import load_file, save_file
from tiny_dflash import dflash_draft_model
from tiny_models import PairPaths, copying_draft_model, make_pair, make_target, mxfp4_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.executors.eager import EagerExecutor
from lowlat.models.target import load_target
from lowlat.speculators.methods import draft_method, load_speculator

DEMO = Path(__file__).parents[2] / "lowlat" / "demo"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 160, "block_size": 16, "prefill_chunk": 32, "device": "cuda"}
DYNAMIC = {"dynamic_tree_max_topk": 4, "max_total_draft_tokens": 11}
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
FORMS: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 3, "windows": (None, 40, 40)},
    "features": {"final_hidden": True, "windows": (24,)},
    "peagle": {"mask_token": 9, "num_hidden_layers": 2, "fc_norm": True},
    "dflash": {"layout": "z-lab"},
    "dspark": {"layout": "deepspec", "markov_rank": 8},
    "dspark_gated": {"layout": "speculators", "markov_rank": 16, "markov_head_type": "gated", "confidence": "states"},
}
QUANTISED = ("fp8-channel", "fp8-block", "w4a16-32", "awq", "nvfp4")
CODED = ("llama:codes", "qwen3:codes", "mxfp4:codes", "dflash:codes")  # with a KV cache of 8 bits
MOE_LAYERS = {"qwen3_moe": None, "moe_fp8": "fp8-channel", "moe_int4": "w4a16-zeros"}  # of Qwen3, by experts' layouts
DENSE = ("llama", "mistral", "qwen2", "qwen3")
NAMES = [*MOE_LAYERS, *DENSE, "gpt_oss", "mxfp4", "alike", *QUANTISED, *FORMS, *CODED, "demo"]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "logprobs": 4},
    "penalised": (
        {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
        | {"logit_bias": {3: 2.0, 11: -5.0}, "min_tokens": 5, "stop_token_ids": (5, 7)}
    ),
}


class CodedPair(PairPaths):
    """A pair whose KV cache holds codes."""


def kv_options(pair: PairPaths) -> dict[str, Any]:
    """The option of a pair's KV cache."""
    return {"kv_cache_dtype": "fp8"} if isinstance(pair, CodedPair) else {}


class MadeWhenAsked(dict[str, Any]):
    """Things by name, each made when it is first asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, self._make(name))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    """Pairs by name: small random ones, of them three mixtures of experts, and the bundled one."""
    return MadeWhenAsked(lambda name: make(name, tmp_path_factory.mktemp(name)))


def make(name: str, folder: Path) -> PairPaths:
    """The pair of a name, in a folder."""
    if name in CODED:
        pair = make(name.removesuffix(":codes"), folder)
        store_kv_scales(pair.target)
        return CodedPair(pair.target, pair.head)
    if name == "demo":
        return PairPaths(DEMO / "target", DEMO / "head")
    if name in ("mxfp4", "alike"):
        return moe(folder, alike=name == "alike")
    if name == "gpt_oss":
        return make_pair(folder, "gpt_oss", **SIZES, num_local_experts=5, num_experts_per_tok=3)
    if name in QUANTISED:
        paths = make_pair(folder, "llama", **{**SIZES, "intermediate_size": 128})
        quantise_target(paths.target, name, None)
        return paths
    if name in MOE_LAYERS:
        sizes = {**SIZES, "intermediate_size": 128, "num_local_experts": 9, "num_experts_per_tok": 8}
        paths, layout = make_pair(folder, "qwen3_moe", **sizes), MOE_LAYERS[name]
        if layout is not None:
            quantise_target(paths.target, layout, None)
        return paths
    if name not in FORMS:
        return make_pair(folder, name, **SIZES)
    form, paths = FORMS[name], PairPaths(folder / "target", folder / "head")
    target = make_target(paths.target, "llama", gain=0.45, num_hidden_layers=2, **SIZES)
    if "layout" in form:
        dflash_draft_model(paths.head, target, copies=True, **form)
    else:
        copying_draft_model(paths.head, target, draft_vocab_size=80, **form)
    return paths


def moe(directory: Path, *, alike: bool) -> PairPaths:
    """Experts in MXFP4, 8 query heads of one key-value head, a window that crosses tiles; all rows may choose alike."""
    paths = PairPaths(directory / "target", directory / "head")
    shape = {"num_local_experts": 9, "num_experts_per_tok": 4, "sliding_window": 70, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2}
    target = mxfp4_target(paths.target, gain=0.45, **SIZES, **shape, **heads)
    copying_draft_model(paths.head, target, draft_vocab_size=80)
    if alike:
        file = paths.target / "model.safetensors"
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("router.weight"):
                tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, file, metadata={"format": "pt"})
    return paths


def trees_of(name: str) -> tuple[Any, ...]:
    """A chain and the trees that the pair's drafts may be."""
    own = FORMS.get(name.removesuffix(":codes"), {})
    return (None, TREE) if "layout" in own or "mask_token" in own else (None, TREE, DYNAMIC)


def load(pair: PairPaths, executor: str, *, tree: Any = None, depth: int = 7, **options: Any) -> Runtime:
    """A runtime that speculates, in bfloat16."""
    method = draft_method(pair.head)
    shape = tree if isinstance(tree, dict) else {"tree": tree}
    config = SpeculativeConfig(model=pair.head, method=method, num_speculative_tokens=depth, strict=True, **shape)
    return Runtime.load(
        pair.target, config, **{**OPTIONS, **kv_options(pair), "dtype": "bfloat16", "executor": executor, **options}
    )


def params(mode: str, seed: int = 7, max_tokens: int = 40) -> SamplingParams:
    """Sampling parameters of a mode; the model's own stop tokens are ignored."""
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **MODES[mode])


def canonical_weights(pair: PairPaths) -> dict[str, torch.Tensor]:
    """Load the checkpoints' weights to the device."""
    target = load_target(pair.target, dtype="bfloat16")
    options = SpeculativeConfig(model=pair.head, method=draft_method(pair.head))
    head = load_speculator(options, target.config)
    return {name: tensor.cuda() for name, tensor in {**target.weights, **head.weights}.items()}


@pytest.mark.parametrize("tree", [None, TREE, DYNAMIC], ids=["chain", "tree", "dynamic"])
@pytest.mark.parametrize("name", NAMES)
def test_every_group_does_what_its_operations_mean(name: str, tree: Any, pairs: dict[str, PairPaths]) -> None:
    if tree not in trees_of(name):
        pytest.skip("its drafts are no dynamic trees")
    depth = 3
    with load(pairs[name], "eager", tree=tree, depth=depth) as runtime:
        executor = runtime.executor
        assert isinstance(executor, EagerExecutor)
        lockstep = Lockstep(executor, canonical_weights(pairs[name]))
        for number, mode in enumerate(MODES):
            runtime.submit(prompt_of(20 + 13 * number, number), params(mode, max_tokens=12))
        run_all(runtime, lambda number: (depth, 0, depth)[number % 3])
        assert not lockstep.problems, "\n".join(lockstep.problems[:20])
        assert sum(lockstep.compared.values()) > 500


@pytest.mark.parametrize("name", NAMES)
def test_a_first_token_s_logits_are_those_of_a_step_but_for_rounding(name: str, pairs: dict[str, PairPaths]) -> None:
    """The same text, its last token once in the prompt and once decoded, after ends of chunks and of blocks."""
    limit = (
        0.3 if name in ("gpt_oss", "mxfp4", "alike", *CODED) else 2e-2
    )  # other experts where two are nearly as likely
    with load(pairs[name], "eager", prefix_reuse=False) as runtime:
        for length in (1, 2, 16, 32, 33, 64, 101):
            prompt = prompt_of(length + 1, length)
            forced = SamplingParams(max_tokens=2, logit_bias={prompt[-1]: 100.0}, ignore_eos=True)
            tokens, decoded = traced(runtime, prompt[:-1], forced, 0)
            assert tokens[0] == prompt[-1]
            _, prefilled = traced(runtime, prompt, SamplingParams(max_tokens=1), 0)
            found, expected = (logits[length + 1].float() for logits in (prefilled, decoded))
            assert (found - expected).norm() < limit * (expected - expected.mean()).norm(), length


@pytest.mark.parametrize("mode", ["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("name", NAMES)
def test_no_depth_neighbour_or_slot_changes_a_bit(name: str, mode: str, pairs: dict[str, PairPaths]) -> None:
    prompt, sampling = prompt_of(45), params(mode)
    own = {**OPTIONS, **kv_options(pairs[name]), "dtype": "bfloat16", "executor": "eager", "prefix_reuse": False}
    with Runtime.load(pairs[name].target, **own) as runtime:
        expected = traced(runtime, prompt, sampling)
    with load(pairs[name], "eager") as runtime:
        for depth in range(8):
            assert_same(traced(runtime, prompt, sampling, depth), expected)
        for seed in range(2):
            rng = random.Random(seed)
            recorder = Recorder(runtime)
            before = rng.randrange(3)
            for other in range(before):
                runtime.submit(prompt_of(rng.randrange(1, 60), other), params("sampled", other, rng.randrange(1, 30)))
            tracked = recorder.submit(prompt, sampling)
            for other in range(3 - before):
                runtime.submit(
                    prompt_of(rng.randrange(1, 60), 9 + other), params("greedy", other, rng.randrange(1, 30))
                )
            tokens = run_all(runtime, rng.choices(range(8), k=400).__getitem__)[tracked]
            recorder.stop()
            assert_same((tokens, recorder.logits[tracked]), expected)
    for tree in trees_of(name)[1:]:
        with load(pairs[name], "eager", tree=tree, depth=3) as runtime:
            assert_same(traced(runtime, prompt, sampling), expected)
            assert_same(traced(runtime, prompt, sampling, lambda number: 3 * (number % 3 > 0)), expected)


@pytest.fixture(scope="module")
def graph_runtimes(pairs: dict[str, PairPaths]) -> Iterator[dict[str, Runtime]]:
    """Graph runtimes by name, captured once."""
    runtimes = MadeWhenAsked(lambda name: load(pairs[name], "graph"))
    yield runtimes
    for runtime in runtimes.values():
        runtime.close()


@pytest.mark.parametrize("name", NAMES)
def test_replay_equals_eager_bit_for_bit(name: str, pairs: dict[str, PairPaths]) -> None:
    """The same requests at the same depths: the same tokens, and the same bits in every buffer that outlives a step.

    Depths go by the number of a step, so prompts must take as many, however long the GPU takes for them.
    """
    depths = random.Random(3).choices(range(8), k=400)
    at_any_pace: dict[str, Any] = {"max_stall_ms": 10000.0}

    def run(runtime: Runtime) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
        names = [
            runtime.submit(prompt_of(9 + 20 * number, 40 + number), params(mode)) for number, mode in enumerate(MODES)
        ]
        tokens = run_all(runtime, depths.__getitem__)
        return {str(k): tokens[each] for k, each in enumerate(names)}, {
            key: tensor.cpu().clone() for key, tensor in runtime.executor.state.items()
        }

    with load(pairs[name], "graph", **at_any_pace) as graph_runtime:
        graph = run(graph_runtime)
    with load(pairs[name], "eager", **at_any_pace) as eager_runtime:
        eager = run(eager_runtime)
    assert graph[0] == eager[0]
    skipped = ("staged", "prefill_", "prompt_", "command")  # a prompt's dead rows are whatever their memory held
    different = [
        key
        for key, tensor in eager[1].items()
        if not key.startswith(skipped) and not torch.equal(tensor.view(torch.uint8), graph[1][key].view(torch.uint8))
    ]
    assert not different


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_s_tokens_do_not_depend_on_the_depth(name: str, mode: str, graph_runtimes: dict[str, Runtime]) -> None:
    """Eight requests at once, the same tokens at every depth."""
    prompts = [prompt_of(5 + 11 * number, 70 + number) for number in range(8)]
    runtime = graph_runtimes[name]

    def tokens_of(depth: int) -> list[list[int]]:
        names = [runtime.submit(prompt, params(mode, number)) for number, prompt in enumerate(prompts)]
        tokens = run_all(runtime, depth)
        return [tokens[request] for request in names]

    found = tokens_of(0)
    assert all(tokens_of(depth) == found for depth in (1, 3, 7))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_the_reference_s_but_for_near_ties(
    name: str, pairs: dict[str, PairPaths], graph_runtimes: dict[str, Runtime]
) -> None:
    """Against torch's operations on the same GPU: where a request first departs, two logits were all but equal."""
    with load(pairs[name], "reference") as reference:
        for number in range(6):
            prompt = prompt_of(5 + 11 * number, 70 + number)
            request = graph_runtimes[name].submit(prompt, params("greedy"))
            found = run_all(graph_runtimes[name], 3)[request]
            expected, logits = traced(reference, prompt, params("greedy"), 3)
            for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                if mine != theirs:
                    row = logits[len(prompt) + place].float()
                    assert row[theirs] - row[mine] < 0.05 * (row.max() - row.mean()), (number, place)
                    break


def test_ten_thousand_random_orders(pairs: dict[str, PairPaths], graph_runtimes: dict[str, Runtime]) -> None:
    """Submit, step and cancel in any order: the books balance, every request ends once, alone or not."""
    runtime, rng = graph_runtimes["llama"], random.Random(11)
    live: set[str] = set()
    ended: set[str] = set()
    cancelled: set[str] = set()  # they end with the next step's output
    for number in range(10_000):
        action = rng.random()
        if action < 0.2 and len(live) < 12:
            mode = rng.choice(list(MODES))
            live.add(
                runtime.submit(prompt_of(rng.randrange(1, 80), number), params(mode, number, rng.randrange(5, 40)))
            )
        elif action < 0.25 and live - cancelled:
            name = rng.choice(sorted(live - cancelled))
            runtime.cancel(name)
            cancelled.add(name)
        else:
            for output in runtime.step(rng.randrange(8)):
                assert output.request_id in live
                if output.finish_reason is not None:
                    assert output.finish_reason != "error"
                    live.discard(output.request_id)
                    ended.add(output.request_id)
        if number % 50 == 0:
            check_invariants(runtime)
    run_all(runtime)
    assert len(ended) > 500
