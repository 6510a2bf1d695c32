"""Drafts from text next to a draft model: what is learnt and chosen, by reference and walked kernel; in a runtime."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_models import DraftingModels
from fake_device import load_fake
from kernel_cases import Arrays, Bench
from kernel_walk import Walker, walkable
from lowered import Pair
from recording import run_all, run_one
from suffix_cases import World, check_choose_drafts
from tiny_models import PairPaths, make_pair

from lowlat import ConfigError, Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ShapeError
from lowlat.kernels.reference.speculation.choose_drafts import (
    CHOSEN,
    DECAY,
    MADE_AT,
    PRIOR,
    choose_drafts,
)
from lowlat.kernels.reference.speculation.suffix_draft import SHARE
from lowlat.kernels.speculation.choose_drafts import choose_drafts as kernel
from lowlat.speculators.base import Speculator
from lowlat.speculators.suffix.beside import TextBeside

SIZES: dict[str, Any] = {"max_batch": 3, "max_context": 128, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_the_kernel_walked_chooses_and_learns_as_the_reference_does(rows: int) -> None:
    walker = Walker()

    def make(given: Arrays, *, fresh: bool) -> list[Any]:
        with walkable(walker, "common.memory", "speculation.choose_drafts") as modules:
            for call in modules[-1].choose_drafts(**given, fresh=fresh):
                walker.run(call)
        return []

    check_choose_drafts(Bench(torch.device("cpu"), lambda *calls: None), rows, make)


def test_probabilities_are_of_drafts_whose_predecessors_were_right() -> None:
    """The model was right once and then wrong; the text's first draft was wrong, and nothing is known of its second."""
    world = World(1, 4)
    arrays = world.arrays
    for name in ("slots", "draft_live", "draft_lens", "match_lens", "draft_nodes", "text_nodes", "draft_shares"):
        arrays[name] = arrays[name][1:2].clone()
    arrays["tokens"][0, :12] = torch.tensor([*range(9), 5, 6, 7])
    arrays["draft_nodes"][:] = torch.tensor([-1, 5, 9, 9])
    arrays["text_nodes"][:] = torch.tensor([-1, 1, 6, -1])
    arrays["draft_shares"][:] = torch.tensor([0, 512, 256, 0])
    arrays["match_lens"][:] = 3
    choose_drafts(**arrays, fresh=True)
    assert arrays["draft_probabilities"][0].tolist() == [[list(entry) for entry in rates] for rates in PRIOR]
    assert arrays["proposals"][0, [MADE_AT, CHOSEN]].tolist() == [9, 0]
    arrays["draft_lens"][:] = 12
    choose_drafts(**arrays, fresh=False)
    expected = [[list(entry) for entry in rates] for rates in PRIOR]
    for source, at, right, promised in ((0, 0, SHARE, SHARE), (0, 1, 0, SHARE), (1, 2, 0, 512)):
        entry = expected[source][at]
        entry[0] += right - (entry[0] >> DECAY)
        entry[1] += promised - (entry[1] >> DECAY)
    assert arrays["draft_probabilities"][0].tolist() == expected


@pytest.mark.parametrize("operation", [choose_drafts, kernel])
def test_what_does_not_fit_is_refused(operation: Any) -> None:
    good = World(1, 4).arrays
    for name, match in (
        ("match_lens", "match_lens must"),
        ("proposals", "proposals must"),
        ("draft_probabilities", "draft_probabilities must"),
    ):
        with pytest.raises(ShapeError, match=match):
            operation(**{**good, name: good[name][:2]}, fresh=False)
    with pytest.raises(ShapeError, match="from 1 to 7 drafts, got 8"):
        operation(**World(1, 9).arrays, fresh=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A target with a draft model that is rarely right."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


def test_a_text_that_is_copied_is_drafted_from_the_text(pair: PairPaths) -> None:
    """More is accepted than of the model's drafts alone, and the tokens are those of the target alone."""
    sampling, prompt = SamplingParams(max_tokens=40, temperature=0.0), [5, 6, 7, 8] * 5
    found: dict[str | None, Any] = {}
    for text in (None, "suffix"):
        config = SpeculativeConfig(pair.head, num_speculative_tokens=4, text_drafts=text, strict=True)
        with Runtime.load(pair.target, config, **SIZES) as runtime:
            name = runtime.submit(prompt, sampling)
            tokens = run_all(runtime)[name]
            first = runtime.submit([*prompt, *tokens, *prompt], sampling)
            run_all(runtime)
            stats = runtime.metrics(first).speculation
            assert stats is not None
            found[text] = (tokens, stats.total_accepted_tokens)
            counts = {name: each["accepted_tokens"] for name, each in stats.to_dict()["by_source"].items()}
            assert sum(counts.values()) == stats.total_accepted_tokens
            assert counts.keys() == ({"eagle3", "suffix"} if text else {"eagle3"})
            report = runtime.summary()["speculator"]
            assert report["method"] == "eagle3" and ("text_drafts" in report) == (text is not None)
            assert isinstance(runtime.speculator, TextBeside) == (text is not None)
            if text:
                assert runtime.executor.state["proposals"][:, CHOSEN].tolist().count(1) > 0
                assert report["text_drafts"]["suffix_cache_max_depth"] == 24
    assert found[None][0] == found["suffix"][0]
    assert found["suffix"][1] > found[None][1]


@pytest.mark.second
def test_ranks_share_the_draft_model_beside_it(tmp_path: Path) -> None:
    """Each has its part, and the tokens are those of one."""
    models, sampling = DraftingModels(tmp_path), SamplingParams(max_tokens=16)
    draft = models.draft_model("float32", "eagle3")
    config = SpeculativeConfig(draft, num_speculative_tokens=4, text_drafts="suffix", strict=True)
    found = []
    for size in (1, 2):
        options = {**SIZES, "tp_invariant": True, "tensor_parallel_size": size}
        with Runtime.load(models.target("float32"), config, **options) as runtime:
            found.append(run_one(runtime, [5, 6, 7, 8] * 5, sampling))
            caches = [each for name, each in runtime.executor.state.items() if name.startswith("draft_model.k_cache")]
            assert caches and {cache.shape[1] for cache in caches} == {8 // size}
            assert runtime.summary()["eagle_speculation"]["by_source"].keys() == {"eagle3", "suffix"}
    assert found[0] == found[1]


def test_it_stands_for_its_model_in_all_that_a_speculator_is() -> None:
    """The rest is of drafting that opens a step, or of longer blocks, which it does not do, and of a target's files."""
    opening = {"waiting_boundaries", "is_in", "longer_draft_length"}
    public = {name for name in vars(Speculator) if name[0] != "_"}
    assert public - set(vars(TextBeside)) == opening


def test_options_that_do_not_go_together_are_refused(pair: PairPaths) -> None:
    head: dict[str, Any] = {"model": pair.head}
    for options, match in (
        ({**head, "text_drafts": "ngram"}, "text_drafts must be 'suffix', got 'ngram'"),
        ({**head, "text_drafts": "suffix", "tree": ((0,),)}, "text_drafts 'suffix' goes with a chain"),
        ({"method": "ngram", "text_drafts": "suffix"}, "text_drafts is an option of method 'eagle3'"),
        ({**head, "max_spec_factor": 2.0}, "max_spec_factor is an option of method 'suffix', and method is 'eagle3'"),
        ({"method": "suffix", "min_token_prob": 1.5}, "min_token_prob must be from 0 to 1, got 1.5"),
        ({"method": "suffix", "max_spec_factor": 0}, "max_spec_factor must be above 0 and at most 16, got 0"),
        ({"method": "suffix", "suffix_cache_max_depth": 33}, "suffix_cache_max_depth must be from 1 to 32, got 33"),
    ):
        with pytest.raises(ConfigError, match=match):
            SpeculativeConfig(**options)
    assert SpeculativeConfig(**head, text_drafts="suffix", max_spec_factor=2.0).max_spec_factor == 2.0


def test_beside_is_no_method(pair: PairPaths) -> None:
    for make in (TextBeside.plan, TextBeside.load):
        with pytest.raises(ConfigError, match="no method of its own"):
            make(SpeculativeConfig(pair.head), None)  # type: ignore[arg-type]


def test_a_step_has_two_operations_more_and_lowers(pair: PairPaths) -> None:
    """After the model's drafts; a prompt's last program begins again."""
    alone, both = Pair(pair.target, pair.head), Pair(pair.target, pair.head, text_drafts="suffix")
    for depth, batch in ((0, 2), (1, 2), (4, 1), (7, 2), (3, 0)):
        kinds = [op.kind for op in alone.program(depth, batch).ops]
        at = kinds.index("tree_masks") if depth else len(kinds)
        program = both.program(depth, batch)
        assert [op.kind for op in program.ops] == kinds[:at] + ["suffix_draft", "choose_drafts"] * (depth > 0) + kinds[
            at:
        ]
        assert {op.params["fresh"] for op in program.ops if op.kind == "choose_drafts"} <= {batch == 0}


def test_a_device_that_repeats_steps_by_itself_gives_the_same(pair: PairPaths) -> None:
    prompts = [[5, 6, 7, 8] * 4, [9, 3], [1, 2, 3] * 6, [4]]
    samplings = [SamplingParams(max_tokens=30, seed=k, temperature=0.7 * (k % 2)) for k in range(4)]
    with Runtime.load(pair.target, **SIZES) as runtime:
        expected = [run_one(runtime, *each) for each in zip(prompts, samplings, strict=True)]
    config = SpeculativeConfig(pair.head, num_speculative_tokens=5, text_drafts="suffix", strict=True)
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    runtime, device = load_fake(pair.target, config, device_loop=True, seed=3, lead=3, **sizes)
    with runtime:
        names = [runtime.submit(*each) for each in zip(prompts, samplings, strict=True)]
        tokens = run_all(runtime)
        assert [tokens[name] for name in names] == expected
        assert device.count("loop") > 0
