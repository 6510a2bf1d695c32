"""Steps of many rows for what grammars force, and for longer blocks of drafts, on a GPU: the tokens of a plain run."""

from typing import Any

import pytest
from recording import prompt_of, run_all
from tiny_dflash import dflash_draft_model
from tiny_grammars import Automaton, Edges, documents, random_edges
from tiny_models import KERNEL_HYBRID, copying_draft_model, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 384, "block_size": 16, "prefill_chunk": 32} | {
    "device": "cuda",
    "dtype": "bfloat16",
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "num_hidden_layers": 2}
HYBRID: dict[str, Any] = KERNEL_HYBRID | {"hidden_size": 128, "intermediate_size": 192}
GRAMMARS: tuple[Edges | None, ...] = (documents(9, 1, 40, 14, 0, 22, 5), None, random_edges(3, 97), documents(30, 3))
MODES: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8}, {"temperature": 0.9, "logprobs": 2}, {"temperature": 1})


def answers(runtime: Runtime, count: int, *, bound: bool = True) -> list[list[int]]:
    """The tokens of so many requests at once; of a single one, alone."""
    names = []
    for number in range(count):
        sampling = SamplingParams(seed=7, max_tokens=150, ignore_eos=True, **MODES[number])
        names.append(runtime.submit(prompt_of(30 + number, seed=number), sampling))
        edges = GRAMMARS[number]
        if bound and edges is not None:
            runtime._requests[names[-1]].grammar = Automaton(edges)
    tokens = run_all(runtime)
    return [tokens[name] for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("models")
    model = make_target(made / "target", "llama", gain=0.45, **SIZES)
    copying_draft_model(made / "eagle3", model, draft_vocab_size=80)
    blocks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("dflash", {}),
        ("dflash2", {"conv": (2, 16), "selector": (8, 6)}),
    )
    for name, more in blocks:
        shape: dict[str, Any] = {"block_size": 16, "layout": "speculators", "num_attention_heads": 8, **more}
        dflash_draft_model(made / name, model, copies=True, **shape)
    make_target(made / "hybrid", "qwen3_5_text", gain=0.4, **HYBRID)
    return made


@pytest.fixture(scope="module")
def expected(folder: Any) -> dict[str, list[list[int]]]:
    found = {}
    for target in ("target", "hybrid"):
        with Runtime.load(folder / target, executor="graph", **OPTIONS) as runtime:
            found[target] = answers(runtime, 4)
            found[f"{target}, free"] = answers(runtime, 4, bound=False)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("executor", "target", "own", "more"),
    [
        ("graph", "target", None, {}),
        ("graph", "target", {"model": "eagle3"}, {"device_loop": True}),
        ("graph", "target", {"model": "eagle3", "tree": ((0,), (1,), (0, 0))}, {}),
        ("graph", "target", {"model": "eagle3", "text_drafts": "suffix", "wide_rows": 32}, {"forced_rows": 0}),
        ("graph", "target", {"model": "dflash", "method": "dflash"}, {"forced_rows": 16}),
        ("graph", "target", {"model": "target", "method": "draft_model"}, {}),
        ("eager", "target", {"model": "eagle3"}, {"fuse": False}),
        ("graph", "hybrid", {"method": "suffix"}, {}),
        ("graph", "hybrid", None, {"forced_rows": 16}),
    ],
    ids=lambda given: str(given)[:40],
)
def test_forced_text_changes_nothing(
    executor: str,
    target: str,
    own: dict[str, Any] | None,
    more: dict[str, Any],
    folder: Any,
    expected: dict[str, list[list[int]]],
) -> None:
    config = None
    if own is not None:
        model = {"model": folder / own["model"]} if "model" in own else {}
        depth = 2 if "tree" in own else 3
        config = SpeculativeConfig(**{**own, **model, "num_speculative_tokens": depth, "strict": True})
    with Runtime.load(folder / target, config, executor=executor, **{**OPTIONS, "forced_rows": 32, **more}) as runtime:
        for count in (1, 2, 4):
            before = runtime.summary().get("forced_verification", {}).get("steps", 0)
            assert answers(runtime, count) == expected[target][:count]
            assert runtime.summary()["forced_verification"]["steps"] > before
        assert answers(runtime, 4, bound=False) == expected[f"{target}, free"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("executor", "draft", "more"),
    [
        ("graph", "dflash", {}),
        ("graph", "dflash2", {"device_loop": True}),
        ("graph", "dflash", {"device_loop": True, "forced_rows": 32}),
        ("eager", "dflash2", {"fuse": False}),
    ],
)
def test_longer_blocks_change_nothing(
    executor: str, draft: str, more: dict[str, Any], folder: Any, expected: dict[str, list[list[int]]]
) -> None:
    config = SpeculativeConfig(
        model=folder / draft, method="dflash", num_speculative_tokens=1, max_block_drafts=15, strict=True
    )
    with Runtime.load(folder / "target", config, executor=executor, **OPTIONS, **more) as runtime:
        for count in (1, 2, 4):
            assert answers(runtime, count) == expected["target"][:count]
            assert answers(runtime, count, bound=False) == expected["target, free"][:count]
        assert runtime.summary()["longer_drafts"]["steps"] > 3
