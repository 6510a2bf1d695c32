"""`lowlat inspect`: what is forecast is what is stored and allocated."""

import json
import re
from pathlib import Path

import pytest
import torch
from cli_calls import answer, lowlat, refusal
from lowered import Pair
from safetensors.torch import load_file, save_file
from tiny_models import PairPaths, make_target, mxfp4_target, random_draft_model

from lowlat import Runtime, SpeculativeConfig
from lowlat.cli.options import bundled
from lowlat.cli.reports.sizes import parts_of
from lowlat.graphs import BufferSet, Paging, Role
from lowlat.models.target import load_target, open_target
from lowlat.speculators.eagle3.weights import load_draft_model

MEGABYTE = 1 << 20


def test_inspect_model_counts_what_is_stored(pair: PairPaths) -> None:
    found = answer("inspect", "model", pair.target, "--context", 100, "--batch", 2, "--json")
    tensors = load_file(pair.target / "model.safetensors")
    assert found["parts"]["total"]["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert found["parts"]["total"]["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert found["parts"]["embedding"] == {"parameters": 97 * 32, "bytes": 4 * 97 * 32}
    assert found["parts"]["ffn"]["parameters"] == 2 * 3 * 32 * 48
    assert found["parts"]["attention"]["parameters"] == 2 * (2 * 32 * 32 + 2 * 16 * 32)
    assert found["geometry"]["hidden_size"] == 32 and found["geometry"]["dtype"] == "float32"
    assert found["default_capture_boundaries"] is None
    assert found["kv"]["bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # k and v, layers, KV heads, head size, float32
    blocks = 2 * -(-(100 + 1) // 32) + 1
    assert found["kv"]["num_blocks"] == blocks
    assert found["kv"]["bytes"] == blocks * 32 * found["kv"]["bytes_per_token"]


def test_inspect_model_sizes_the_kv_cache(pair: PairPaths) -> None:
    """In GiB; what a GPU has left is asked of one that is here."""
    sizes = ("--context", 100, "--kv-cache-gib")
    kv = answer("inspect", "model", pair.target, *sizes, 0.01, "--json")["kv"]
    block = 32 * kv["bytes_per_token"]
    assert kv["bytes"] <= 0.01 * (1 << 30) < kv["bytes"] + block
    assert kv["bytes"] == kv["num_blocks"] * block and kv["capacity_tokens"] == (kv["num_blocks"] - 1) * 32
    shown = lowlat("inspect", "model", pair.target, *sizes, 0.01).stdout
    assert re.search(rf"tokens that it holds +{kv['capacity_tokens']:,}", shown)
    model = ("inspect", "model", pair.target)
    assert "kv_cache_gib 1e-06 is less than" in refusal(*model, *sizes, 1e-6)
    assert "kv_cache_gib 'free' is what a GPU has left" in refusal(*model, *sizes, "free", "--device", "cpu")
    assert "give a number of GiB" in refusal(*model, *sizes, "free", "--device", "cuda:63")
    assert "give a number of GiB" in refusal("inspect", "step", "--kv-cache-gib", "free")


@pytest.mark.parametrize("with_draft_model", [False, True])
def test_inspect_model_forecasts_what_a_runtime_allocates(pair: PairPaths, with_draft_model: bool) -> None:
    extra = ("--head", pair.head, "-S", 2) if with_draft_model else ()
    found = answer("inspect", "model", pair.target, *extra, "--context", 100, "--batch", 3, "--buffers", "--json")
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=2) if with_draft_model else None
    with Runtime.load(pair.target, speculative, max_batch=3, max_context=100) as runtime:
        state = runtime.executor.state
        caches = sum(spec.num_bytes for spec in state.specs.values() if spec.paging is Paging.POSITIONS)
        assert found["memory"]["kv_bytes"] == found["kv"]["bytes"] == caches
        bucket = runtime.ladder.choose(3, 2 if with_draft_model else 0)
        program = runtime.executor.program(bucket)
        assert found["bucket"] == program.name
        scratch: dict[str, BufferSet] = {str(each): runtime.executor.scratch(each) for each in runtime.ladder.buckets}
        listed = {buffer["name"]: buffer for buffer in found["buffers"]}
        assert set(listed) == set(program.buffers)
        for name, spec in program.buffers.items():
            assert listed[name]["shape"] == list(spec.shape) and listed[name]["bytes"] == spec.num_bytes
            assert f"torch.{listed[name]['dtype']}" == str(spec.dtype) and listed[name]["role"] == spec.role.value
        own = sum(buffers.num_bytes(Role.SCRATCH) for buffers in scratch.values())
        assert own <= found["memory"]["scratch_bytes"]  # and prefill's
    parts = ("weights", "kv", "state", "scratch")
    assert found["memory"]["total_bytes"] == sum(found["memory"][f"{part}_bytes"] for part in parts)
    load = found["memory"]["host_load_bytes"]
    assert found["memory"]["host_peak_bytes"] == found["memory"]["total_bytes"] + load and load > 0  # on a CPU
    weights = load_target(pair.target).weights | (
        load_draft_model(pair.head, runtime.model_config).weights if with_draft_model else {}
    )
    unique = {tensor.data_ptr(): tensor.nbytes for tensor in weights.values()}
    assert found["memory"]["weights_bytes"] == sum(unique.values())  # float32, as stored


def test_inspect_model_plans_for_a_gpu_that_is_not_here() -> None:
    found = answer("inspect", "model", "--device", "cuda", "--head", bundled("head"), "--json")
    assert (found["device"], found["executor"]) == ("cuda:0", "graph")
    held = Pair(bundled("target"), bundled("head")).weights  # packed, padded, the tied table once
    assert found["memory"]["weights_bytes"] == held.num_bytes
    head = sum(tensor.nbytes for tensor in load_file(bundled("head") / "model.safetensors").values())
    load = found["memory"]["host_load_bytes"]
    assert head < load == found["memory"]["host_peak_bytes"] < head + found["files"]["bytes"] + MEGABYTE
    assert "must be 'auto', 'cpu', 'cuda'" in refusal("inspect", "model", "--device", "cuda:x")


def test_inspect_model_counts_packed_experts(tmp_path: Path) -> None:
    mxfp4_target(tmp_path, hidden_size=96, intermediate_size=160, head_dim=64)
    found = answer("inspect", "model", tmp_path, "--device", "cuda", "--dtype", "bfloat16", "--json")
    assert found["executor"] == "graph"
    assert found["memory"]["weights_bytes"] == Pair(tmp_path).weights.num_bytes


def test_inspect_model_knows_gpt_oss(tmp_path: Path) -> None:
    mxfp4_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    found = answer("inspect", "model", tmp_path, "--device", "cuda:1", "--dtype", "bfloat16", "--json")
    weights = open_target(tmp_path, dtype="bfloat16").weights
    assert found["device"] == "cuda:1"
    assert found["memory"]["weights_bytes"] >= sum(tensor.nbytes for tensor in weights.shapes().values())
    assert found["memory"]["host_load_bytes"] == weights.arena_bytes
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert found["files"] == {"count": 1, "tensors": len(tensors), "bytes": stored}
    blocks = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("_blocks"))
    assert found["parts"]["experts"]["parameters"] > 2 * blocks
    (tmp_path / "model.safetensors").unlink()
    assert answer("inspect", "model", tmp_path, "--dtype", "bfloat16", "--json")["files"] is None
    save_file({**tensors, "model.layers.0.mlp.router.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    message = refusal("inspect", "model", tmp_path)
    assert "'model.layers.0.mlp.router.bias': expected shape [4], found [3]" in message


def test_inspect_model_refuses_what_load_refuses(pair: PairPaths) -> None:
    for command in ("model", "step"):
        assert re.search(
            r"--context 513 exceeds .* 512 \(.*lower --context$",
            refusal("inspect", command, pair.target, "--context", 513),
        )
        assert "'--context': 0 is not in the range" in refusal("inspect", command, pair.target, "--context", 0)
        assert "'--batch': 33 is not in the range 1<=x<=32" in refusal("inspect", command, "--batch", 33)
    assert "--num-speculative-tokens needs a draft model" in refusal("inspect", "model", pair.target, "-S", 3)


def test_mxfp4_blocks_hold_two_parameters_a_byte() -> None:
    plan = {
        "layers.0.experts.down.blocks": ((4, 64, 2, 16), torch.uint8),
        "layers.0.experts.down.scales": ((4, 64, 2), torch.uint8),
        "layers.0.router.weight": ((4, 64), torch.bfloat16),
    }
    parts = parts_of(plan)
    assert parts["experts"] == {"parameters": 4 * 64 * 64 + 4 * 64, "bytes": 4 * 64 * 34 + 2 * 4 * 64}
    assert parts["total"] == parts["experts"]


@pytest.mark.parametrize(
    ("override", "boundaries", "meaning"),
    [((), [0, 2, 2], "boundaries: id k"), (("--capture-layers", "1,1,2"), [1, 1, 2], "--capture-layers")],
)
def test_inspect_draft_model_names_convention_and_vocabulary(
    pair: PairPaths, override: tuple[str, ...], boundaries: list[int], meaning: str
) -> None:
    arguments = (pair.head, "--target", pair.target, *override, "--json")
    found = answer("inspect", "draft-model", *arguments)
    assert found == answer("inspect", "head", *arguments)
    assert found["layout"] == "speculators"
    assert found["capture"]["boundaries"] == boundaries
    assert meaning in found["capture"]["convention"]
    assert found["capture"]["ids"] == [0, 2, 2] and found["capture"]["target_layers"] == 2
    assert found["draft_vocabulary"]["draft_ids"] == 80 and found["draft_vocabulary"]["target_ids"] == 97
    assert found["draft_vocabulary"]["map"] == "d2t"
    tensors = load_file(pair.head / "model.safetensors")
    stored = sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert found["parts"]["total"]["parameters"] == stored
    assert found["flags"]["norm_before_residual"] is True and found["flags"]["norm_output"] is False


def test_inspect_head_sees_layers_outputs(pair: PairPaths, tmp_path: Path) -> None:
    random_draft_model(tmp_path, make_target(tmp_path / "target", "llama"), captures=(0, 1, 2))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["speculators_model_type"], config["eagle_aux_hidden_state_layer_ids"]
    config |= config.pop("transformer_layer_config") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer("inspect", "head", tmp_path, "--target", tmp_path / "target", "--json")
    assert found["layout"] == "modelopt"
    assert found["capture"]["ids"] == [0, 1, 2] and found["capture"]["boundaries"] == [1, 2, 3]
    assert found["capture"]["convention"] == "layers' outputs: id k is boundary k + 1"


def test_inspect_tree_gives_nodes_masks_and_shapes(pair: PairPaths, tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [1], [0, 0]]")
    found = answer("inspect", "tree", tree, "--batch", 2, "--target", pair.target, "--head", pair.head, "--json")
    assert (found["num_nodes"], found["depth"], found["max_non_leaves_per_layer"]) == (4, 2, 1)
    assert [node["mask"] for node in found["nodes"]] == ["0x1", "0x3", "0x5", "0xb"]
    assert found["paths"] == [[0, 2], [0, 1, 3]]
    assert found["levels"] == [[{"node": 0, "children": [1, 2]}], [{"node": 1, "children": [3]}]]
    shapes = {buffer["name"]: buffer["shape"] for buffer in found["buffers"]}
    assert shapes["row_masks"] == [2, 4] and shapes["tree_paths"] == [2, 2, 3] and shapes["accepted_lens"] == [2]
    assert len(shapes) == 16


def test_keys_and_values_of_layers_that_all_have_windows_are_shown(tmp_path: Path) -> None:
    """A token takes bytes there while it is in the window, though no cache grows with the text."""
    make_target(tmp_path, "mistral", sliding_window=48)
    asked = ("inspect", "model", tmp_path, "--context", 512)
    kv = answer(*asked, "--json")["kv"]
    a_token = 2 * 3 * 2 * 8 * 4  # k and v, layers, KV heads, head size, float32
    assert (kv["bytes_per_token"], kv["window_bytes_per_token"]) == (0, a_token)
    (pool,) = kv["windows"]
    assert kv["bytes"] == pool["bytes"] == pool["num_blocks"] * kv["block_size"] * a_token
    assert "KV bytes a token, in windows of layers" in lowlat(*asked).stdout
    assert "window_bytes_per_token" not in answer(*asked[:3], "--context", 48, "--json")["kv"]  # it holds all of it


def test_what_if_recommends_limits_and_names_its_assumptions(tmp_path: Path) -> None:
    assumed = answer("inspect", "tree", "--what-if", "--json")["what_if"]
    assert assumed["acceptance_from"].startswith("assumed")
    table = tmp_path / "table.json"
    table.write_text("[[0.6, 0.3], [0.5, 0.1]]")
    common = ("inspect", "tree", "--what-if", "--acceptance", table, "--json")
    found = answer(*common, "--budgets", "1,3,5")["what_if"]
    assert [plan["mean_acceptance_length"] for plan in found["plans"]] == pytest.approx([1.0, 1.9, 2.35])
    assert found["recommended"]["choices"] == [[0], [1], [0, 0], [1, 0]]
    limits = ("max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer")
    assert [found["recommended"][name] for name in limits] == [3, 5, 2]
    a_row = sum(found["kv"].values())
    assert a_row > found["kv"]["bytes_per_token"] > 0
    assert [plan["kv_bytes"] for plan in found["plans"]] == [found["batch"] * rows * a_row for rows in (1, 3, 5)]
    timed = answer(*common, "--budgets", "1,3,5", "--step-times-us", "100,110,200")["what_if"]
    assert timed["recommended"]["budget"] == 3
    assert "given" not in timed["acceptance_from"] and timed["acceptance_from"] == str(table)
    table.write_text('{"acceptance": 1}')
    assert "expected a list for each depth" in refusal(*common)
    table.write_text("[[0.9, 0.3]]")
    assert "adds up to 1.2" in refusal(*common)


@pytest.mark.parametrize("part", ["model", "head", "tree"])
def test_inspect_prints_tables_too(pair: PairPaths, part: str) -> None:
    arguments: dict[str, tuple[object, ...]] = {
        "model": (pair.target, "--head", pair.head, "--buffers"),
        "head": (pair.head, "--target", pair.target),
        "tree": ("--chain", 3, "--target", pair.target, "--head", pair.head, "--what-if"),
    }
    words = {
        "model": ("k_cache.0", "host peak"),
        "head": ("norm_before_residual", "speculators"),
        "tree": ("0xf",),
    }
    result = lowlat("inspect", part, *arguments[part])
    assert result.exit_code == 0
    assert all(word in result.stdout for word in words[part])
    assert "\x1b" not in result.stdout
