"""The runtime's options: every bound from both sides, every wrong type, and messages that name the option."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.engine.loading.speculation import make_topologies
from lowlat.errors import ConfigError
from lowlat.kernels.reference.speculation.grow import first_entry
from lowlat.options.acceptance import expected_accept_length
from lowlat.options.method_options import METHOD_OPTIONS
from lowlat.options.runtime import RuntimeConfig, TraceConfig, options_from
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.methods import METHODS
from lowlat.speculators.tree.dynamic import DynamicTree

SPECULATIVE_BOUNDS = {
    "num_speculative_tokens": (0, 7),
    "max_path_len": (1, 8),
    "max_decoding_tokens": (1, 64),
    "max_non_leaves_per_layer": (1, 64),
    "draft_tensor_parallel_size": (1, 8),
    "draft_vocab_size": (1, 1 << 20),
    "draft_window": (1, 1 << 20),
    "simulated_seed": (0, (1 << 63) - 1),
    "specpv_block_size": (1, 1024),
    "specpv_n_sink_blocks": (1, 4096),
    "specpv_n_retrieval_blocks": (1, 1 << 16),
    "specpv_n_window_blocks": (1, 4096),
    "specpv_n_spec_tokens_buf": (2, 1 << 14),
    "specpv_partial_threshold": (0, 1 << 20),
    "specpv_full_refresh_steps": (1, 1 << 16),
}
RUNTIME_BOUNDS = {
    "max_batch": (1, 32),
    "max_context": (2, 1 << 20),
    "block_size": (1, 1024),
    "prefill_chunk": (1, 1 << 16),
    "max_prefill_chunks": (1, 64),
    "kv_blocks": (2, (1 << 31) - 1),
    "max_queue": (0, 1 << 20),
    "tensor_parallel_size": (1, 8),
    "state_interval": (0, 1 << 24),
}
NO_INT: list[Any] = [True, False, 1.0, "1", [1], math.nan]


def speculative(**options: Any) -> SpeculativeConfig:
    if any(name.startswith("specpv_") for name in options):
        options["enable_specpv"] = True
    if {"max_path_len", "max_decoding_tokens"} & set(options):
        options.setdefault("num_speculative_tokens", 0)  # which any limit holds
    if "draft_vocab_size" in options:
        options["draft_vocab"] = "ids.json"
    return SpeculativeConfig(**{"model": "head", **options})


def runtime(**options: Any) -> RuntimeConfig:
    if set(options) <= {"prefill_chunk"}:
        options["block_size"] = 1  # a chunk is a multiple of it
    return RuntimeConfig(**{"prefill_chunk": options.get("block_size", 32), **options})


def test_every_option_is_covered_here() -> None:
    others = {
        "model",
        "method",
        "capture_layers",
        "tree",
        "enabled",
        "strict",
        "simulated_acceptance",
        "simulated_accept_length",
    }
    others |= {"dynamic_tree_max_topk", "max_draft_len", "max_total_draft_tokens"}
    others |= set(METHOD_OPTIONS["ngram"]) | {"text_drafts", "draft_quantize", *METHOD_OPTIONS["suffix"]}
    others |= {"adaptive_width", "enable_specpv", "specpv_lossless", "draft_vocab", "max_block_drafts"}
    assert {item.name for item in dataclasses.fields(SpeculativeConfig)} == {*SPECULATIVE_BOUNDS, *others}
    others = {"dtype", "device", "executor", "prefix_reuse", "share_decoded", "device_loop", "fuse", "perf_mode"}
    others |= {"traces", "watchdog_factor", "watchdog_min_s", "quantize", "quantize_lm_head", "prompt_logits"}
    others |= {"prompt_logprobs", "check", "on_failed_check", "count_tiles", "forced_rows"}
    others |= {"kv_cache_dtype", "activations", "max_stall_ms", "devices", "tp_invariant", "state_cache_gib"}
    others |= {"host_cache_gib", "cache_dir", "cache_gib", "cache_copy_gb_per_s", "session_ttl_s", "can_sleep"}
    others |= {"pause_gib", "pause_deadline_s", "kv_cache_gib"}
    assert {item.name for item in dataclasses.fields(RuntimeConfig)} == {*RUNTIME_BOUNDS, *others}


@pytest.mark.parametrize(
    ("make", "name", "low", "high"),
    [(speculative, name, *bounds) for name, bounds in SPECULATIVE_BOUNDS.items()]
    + [(runtime, name, *bounds) for name, bounds in RUNTIME_BOUNDS.items()],
)
def test_integer_bounds(make: Any, name: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(make(**{name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"^{name} must be from {low} to {high}, got {value}$"):
            make(**{name: value})
    with pytest.raises(ConfigError, match=f"^{name} must be from {low} to {high}, got an integer of 33220 bits"):
        make(**{name: 10**10_000})
    for wrong in NO_INT:
        with pytest.raises(ConfigError) as caught:
            make(**{name: wrong})
        kind = "an integer or 'auto'" if name == "num_speculative_tokens" else "an integer"
        assert str(caught.value) == f"{name} must be {kind}, got {wrong!r}"


def test_the_kv_cache_is_gib_or_all_that_is_free() -> None:
    for size in (1e-6, 40, 16384.0, "free", None):
        assert runtime(kv_cache_gib=size).kv_cache_gib == size
    for size in (0.0, 16385, -1):
        with pytest.raises(ConfigError, match=r"^kv_cache_gib must be above 0\.0 and at most 16384\.0, got "):
            runtime(kv_cache_gib=size)
    for wrong in ("all", "0.9", True, [1.0]):
        with pytest.raises(ConfigError) as caught:
            runtime(kv_cache_gib=wrong)
        assert str(caught.value) == f"kv_cache_gib must be a number or 'free', got {wrong!r}"
    with pytest.raises(ConfigError, match=r"^kv_cache_gib must be a finite number, got nan$"):
        runtime(kv_cache_gib=math.nan)
    for size in (1.5, "free"):
        with pytest.raises(ConfigError, match=f"^kv_cache_gib {size!r} and kv_blocks 9 both size the KV cache"):
            runtime(kv_cache_gib=size, kv_blocks=9)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (speculative, "enabled"),
        (speculative, "strict"),
        (speculative, "enable_specpv"),
        (runtime, "prefix_reuse"),
        (runtime, "share_decoded"),
        (runtime, "count_tiles"),
    ]
    + [(runtime, "device_loop")]
    + [(TraceConfig, name) for name in ("step", "accept", "kv", "tree")],
)
def test_switches_are_bools(make: Any, name: str) -> None:
    for value in (True, False):
        assert getattr(make(**{name: value}), name) is value
    for wrong in (0, 1, "true", None):
        with pytest.raises(ConfigError, match=f"^{name} must be true or false, got {wrong!r}$"):
            make(**{name: wrong})


def test_the_draft_model_is_a_path() -> None:
    assert SpeculativeConfig(Path("head")).model == Path("head")
    wrong: tuple[Any, ...] = ("", None, 5, b"head")
    for model in wrong:
        with pytest.raises(
            ConfigError, match=r"^model must be the path of a draft model's directory for method 'eagle"
        ):
            SpeculativeConfig(model)


@pytest.mark.parametrize("method", ["eagle", "EAGLE3", "", None, 3])
def test_a_method_is_one_of_the_table(method: Any) -> None:
    assert METHOD_OPTIONS.keys() == METHODS.keys() | {"auto"}
    known = "'eagle3', 'mtp', 'ngram', 'suffix', 'peagle', 'dflash', 'dspark', 'draft_model' or 'auto'"
    with pytest.raises(ConfigError, match=f"^method must be {known}, got {method!r}$"):
        speculative(method=method)


def test_ngram_needs_no_model() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=3, prompt_lookup_max=3)
    assert config.model is None and config.prompt_lookup_min == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "head"}, "model is an option of method 'eagle3', and method is 'ngram'"),
        ({"tree": ((0,),)}, "tree is an option of method 'eagle3', and method is 'ngram'"),
        ({"draft_window": 8}, "draft_window is an option of method 'eagle3', and method is 'ngram'"),
        ({"capture_layers": (1,)}, "capture_layers is an option of method 'eagle3', and method is 'ngram'"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max must be from 1 to 16, got 0"),
        ({"prompt_lookup_max": 17}, "prompt_lookup_max must be from 1 to 16, got 17"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be from 1 to 16, got 0"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min must be from 1 to 4, got 5"),
    ],
)
def test_ngram_refuses_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        SpeculativeConfig(**{"method": "ngram", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dynamic_tree_max_topk": None},
            "max_total_draft_tokens is an option of a dynamic tree, which dynamic_tree_max",
        ),
        ({"dynamic_tree_max_topk": 1}, "dynamic_tree_max_topk must be from 2 to 16, got 1"),
        ({"dynamic_tree_max_topk": 17}, "dynamic_tree_max_topk must be from 2 to 16, got 17"),
        ({"max_total_draft_tokens": 32}, "max_total_draft_tokens must be from 2 to 31, got 32"),
        ({"max_draft_len": 8}, "max_draft_len must be from 2 to 7, got 8"),
        ({"max_draft_len": 3}, "max_draft_len 3 is not num_speculative_tokens 5; give one of them, or the same"),
        ({"tree": ((0,),)}, "tree is an option of static trees, and dynamic_tree_max_topk makes a dynamic one"),
        ({"max_decoding_tokens": 9}, "max_decoding_tokens is an option of static trees"),
        ({"method": "ngram", "model": None}, "is an option of method 'eagle3', and method is 'ngram'"),
        ({"text_drafts": "suffix"}, "text_drafts 'suffix' goes with a chain, and dynamic_tree_max_topk asks for more"),
        (
            {"adaptive_width": True},
            "adaptive_width chooses among chains .*, and dynamic_tree_max_topk asks for one of its",
        ),
        ({"num_speculative_tokens": 1}, r"a dynamic tree is at least 2 deep, got 1 \(max_draft_len\)"),
        ({"num_speculative_tokens": 7, "dynamic_tree_max_topk": 11}, r"11 \* \(max_draft_len 7 - 1\) = 66 is above 64"),
        ({"max_total_draft_tokens": 4}, "must be from max_draft_len 5 to the 68 drafts that dynamic_tree_max_topk 4 l"),
        ({"num_speculative_tokens": 2, "dynamic_tree_max_topk": 2}, "to the 6 drafts that .* 2 looks at, got 12"),
    ],
)
def test_a_dynamic_tree_that_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"num_speculative_tokens": 5, "dynamic_tree_max_topk": 4, "max_total_draft_tokens": 12}
    assert make_topologies(speculative(max_draft_len=5, **good))[5].num_nodes == 13
    assert speculative(dynamic_tree_max_topk=4, max_draft_len=5).num_speculative_tokens == 5, "the depth alone"
    with pytest.raises(ConfigError, match=message):
        make_topologies(speculative(**{**good, **options}))


@given(st.integers(2, 16), st.integers(2, 7), st.integers(2, 31), st.randoms(use_true_random=False))
def test_a_dynamic_tree_has_no_more_leaves_than_paths(top_k: int, depth: int, drafts: int, source: Any) -> None:
    """Trees that grow wherever it adds a leaf, and wherever chance has it."""
    if top_k * (depth - 1) > 64 or not depth <= drafts <= first_entry(depth + 1, top_k):
        return
    shape, parents, children = DynamicTree(depth, top_k, drafts + 1), [-1], [0]
    greedy = source.random() < 0.5
    for node in range(1, drafts + 1):
        open_ones = [above for above in range(node) if children[above] < top_k]
        inner = [above for above in open_ones if children[above]] if greedy else []
        parent = source.choice(inner or open_ones)
        parents.append(parent)
        children.append(0)
        children[parent] += 1
    assert sum(count == 0 for count in children) <= shape.num_paths


def test_capture_layers() -> None:
    assert speculative(capture_layers=[2, 16, 29]).capture_layers == (2, 16, 29)
    assert speculative(capture_layers=(0, 1 << 16)).capture_layers == (0, 1 << 16)
    for wrong in (5, "123", {1, 2}):
        with pytest.raises(ConfigError, match=r"^capture_layers must be a list of boundaries, got "):
            speculative(capture_layers=wrong)
    for layer in (-1, (1 << 16) + 1, True, 1.5, None):
        with pytest.raises(ConfigError, match=f"^capture_layers must be .*got {layer}$"):
            speculative(capture_layers=(1, layer))


def test_simulated_accept_length() -> None:
    for value in (1, 1.0, 2.5, 4.0, None):
        assert speculative(simulated_accept_length=value).simulated_accept_length == value
    for value in (0.99, 4.01, math.nan, math.inf, -math.inf, 0):
        match = r"^simulated_accept_length must be from 1 to num_speculative_tokens \+ 1 = 4, got "
        with pytest.raises(ConfigError, match=f"{match}{value}$"):
            speculative(simulated_accept_length=value)
    for wrong in (True, "2", [2]):
        with pytest.raises(ConfigError, match=r"^simulated_accept_length must be a number, got "):
            speculative(simulated_accept_length=wrong)
    assert speculative(num_speculative_tokens=0, simulated_accept_length=1.0).num_speculative_tokens == 0
    with pytest.raises(ConfigError, match=r"= 1, got 2"):
        speculative(num_speculative_tokens=0, simulated_accept_length=2)


@pytest.mark.parametrize("name", ["max_path_len", "max_decoding_tokens"])
def test_a_chain_longer_than_a_limit_is_refused(name: str) -> None:
    for depth in range(8):
        assert speculative(num_speculative_tokens=depth, **{name: depth + 1}).num_speculative_tokens == depth
        if depth:
            with pytest.raises(ConfigError, match=rf"{name} {depth} is below the {depth + 1} nodes.* {name}"):
                speculative(num_speculative_tokens=depth, **{name: depth})
    with pytest.raises(ConfigError, match=f"{name} 7 is below the 8 nodes"):
        speculative(num_speculative_tokens="auto", **{name: 7})
    assert speculative(tree=[[0], [1]], num_speculative_tokens=1, max_path_len=2, max_decoding_tokens=3).tree


@pytest.mark.parametrize("name", ["max_path_len", "max_non_leaves_per_layer"])
def test_limits_that_exclude_each_other_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} 5 is above max_decoding_tokens 4"):
        speculative(tree=[[0]], **{name: 5}, max_decoding_tokens=4)


class Loaded:
    """A runtime with these sizes."""

    def __init__(self, **limits: Any) -> None:
        self.speculation_limits = limits


def test_a_configuration_says_how_it_lies_beside_an_engine() -> None:
    sizes = {"num_speculative_tokens": 7, "max_path_len": 8, "max_decoding_tokens": 8, "max_non_leaves_per_layer": 1}
    engine = Loaded(method="eagle3", capture_layers=(2, 8, 13), **sizes)

    def verdicts(**options: Any) -> dict[str, str]:
        found = speculative(**options).check(engine)
        assert all(check.fits for check in found) or any("load again" in check.verdict for check in found)
        return {check.name: check.verdict for check in found}

    plain = verdicts()
    assert plain["method"] == "the same" and plain["capture_layers"] == "left open"
    assert plain["num_speculative_tokens"] == plain["max_decoding_tokens"] == "within what is loaded"
    assert verdicts(max_path_len=8)["max_path_len"] == "the same"
    assert verdicts(tree=[[0]], max_decoding_tokens=9)["max_decoding_tokens"] == "above what is loaded; load again"
    assert verdicts(capture_layers=(2, 8, 14))["capture_layers"] == "another; load again"
    assert verdicts(method="peagle")["method"] == "another; load again"
    assert not any(check.fits for check in speculative().check(Loaded()) if check.asked is not None)


def test_imposed_acceptance_is_one_probability_for_all_positions() -> None:
    assert speculative().imposed_acceptance is None
    assert speculative(simulated_acceptance=0.607).imposed_acceptance == 0.607
    for depth in range(8):
        for length in (1.0, 1 + depth / 2, depth + 1.0):
            imposed = speculative(num_speculative_tokens=depth, simulated_accept_length=length).imposed_acceptance
            assert imposed is not None and 0 <= imposed <= 1
            assert expected_accept_length(imposed, depth) == pytest.approx(length)
    with pytest.raises(ConfigError, match="give one of them"):
        speculative(simulated_acceptance=0.5, simulated_accept_length=2)
    with pytest.raises(ConfigError, match=r"simulated_acceptance must be .* 0 to 1"):
        speculative(simulated_acceptance=1.5)


@pytest.mark.parametrize(("name", "choices"), [
    ("dtype", ("auto", "bfloat16", "float32")),
    ("executor", ("auto", "reference", "eager", "graph")),
    ("perf_mode", ("default", "strict")),
])  # fmt: skip
def test_choices(name: str, choices: tuple[str, ...]) -> None:
    for value in choices:
        assert getattr(runtime(**{name: value}), name) == value
    for wrong in ("float16", "", None, 5, ["auto"]):
        with pytest.raises(ConfigError, match=f"^{name} must be '{choices[0]}'.* or '{choices[-1]}', got ") as caught:
            runtime(**{name: wrong})
        assert str(caught.value).endswith(f"got {wrong!r}")


def test_prefill_chunk_is_a_multiple_of_block_size() -> None:
    assert RuntimeConfig(block_size=16, prefill_chunk=48).prefill_chunk == 48
    with pytest.raises(ConfigError, match=r"^prefill_chunk must be a multiple of block_size 16, got 40$"):
        RuntimeConfig(block_size=16, prefill_chunk=40)


def test_device_and_traces_have_their_types() -> None:
    for wrong in (None, 0, b"cpu"):
        with pytest.raises(ConfigError, match=r"^device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got "):
            runtime(device=wrong)
    for traces in (None, True, {"step": True}):
        with pytest.raises(ConfigError, match=r"^traces must be a TraceConfig, got "):
            runtime(traces=traces)


def test_unknown_options_are_refused_by_name() -> None:
    assert options_from({"max_batch": 2}) == RuntimeConfig(max_batch=2)
    assert options_from({}) == RuntimeConfig()
    with pytest.raises(
        ConfigError, match=r"^unknown option 'max_bach'; did you mean 'max_batch'\?; the options are .*max_batch"
    ):
        options_from({"max_batch": 2, "max_bach": 2})
    with pytest.raises(ConfigError, match=r"^max_batch must be from 1 to 32, got 33$"):
        options_from({"max_batch": 33})


def test_configs_are_frozen() -> None:
    for made, name in ((RuntimeConfig(), "max_batch"), (speculative(), "tree"), (TraceConfig(), "kv")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, 1)


@pytest.mark.parametrize(("name", "low", "high"), [("watchdog_factor", 2.0, 1000.0), ("watchdog_min_s", 0.1, 3600.0)])
def test_number_bounds(name: str, low: float, high: float) -> None:
    make: Any = RuntimeConfig
    for value in (low, high, round(high)):
        assert getattr(make(**{name: value}), name) == value
    for value in (low - 0.01, high + 1, math.nan, math.inf, -1):
        with pytest.raises(ConfigError, match=f"{name} must be (from {low} to {high}|a finite number), got"):
            make(**{name: value})
    for wrong in (True, "1", None, [1.0]):
        with pytest.raises(ConfigError, match=f"{name} must be a finite number"):
            make(**{name: wrong})


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))


SPECULATIVE_NAMES = sorted({item.name for item in dataclasses.fields(SpeculativeConfig)} - {"tree"})
RUNTIME_NAMES = [item.name for item in dataclasses.fields(RuntimeConfig)]


def check_taken_or_refused(make: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        config = make(**options)
    except ConfigError as error:
        assert any(name in str(error) for name in options)
    else:
        assert dataclasses.replace(config) == config


@given(options=st.dictionaries(st.sampled_from(SPECULATIVE_NAMES), ANYTHING))
def test_any_speculative_options_are_taken_or_refused(options: dict[str, Any]) -> None:
    check_taken_or_refused(speculative, options)


@given(options=st.dictionaries(st.sampled_from(RUNTIME_NAMES), ANYTHING))
def test_any_runtime_options_are_taken_or_refused(options: dict[str, Any]) -> None:
    check_taken_or_refused(RuntimeConfig, options)


def test_mtp_and_auto_need_no_model() -> None:
    """MTP's weights are the target's; auto takes whatever a draft model may have, and is no method of its own."""
    assert SpeculativeConfig(method="mtp", draft_vocab="ids.json", draft_vocab_size=8).model is None
    assert SpeculativeConfig(method="auto", model="head", capture_layers=(1, 2, 3)).capture_layers == (1, 2, 3)
    with pytest.raises(ConfigError, match=r"^model is an option of method 'eagle3', and method is 'mtp'$"):
        SpeculativeConfig(method="mtp", model="head")
    with pytest.raises(ConfigError, match=r"^prompt_lookup_max is an option of method 'ngram', and method is 'auto'$"):
        SpeculativeConfig(method="auto", prompt_lookup_max=3)
    with pytest.raises(ConfigError, match=r"^draft_vocab_size 8 is of the tokens of a file, and draft_vocab names"):
        SpeculativeConfig(method="mtp", draft_vocab_size=8)
