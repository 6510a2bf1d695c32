"""`lowlat compare`: it passes where lowlat is right, and names the stage from which on it is not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from quantised_layers import quantise_target
from safetensors.torch import load_file, save_file
from stages import staged
from tiny_dflash import dflash_draft_model
from tiny_models import FAMILIES, make_target, mxfp4_target, random_draft_model

from lowlat.cli.commands.compare import command
from lowlat.errors import ConfigError, RequestError
from lowlat.executors.reference import ReferenceExecutor
from lowlat.graphs import Bucket
from lowlat.tools.compare.recording import Recording, load_recording, save_recording
from lowlat.tools.compare.stages import LEVEL_STAGES, common_rows, differences, record

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "norms": {"norm_before_fc": True, "norm_before_residual": True},
    "d2t-other-width": {"draft_vocab_size": 33, "hidden_size": 20, "own_embedding": True},
    "qk-norm-biased": {"qk_norm": True, "attention_bias": True, "mlp_bias": True},
    "target-lm-head": {"own_lm_head": False},
    "five-captures": {"captures": (1, 2, 3, 3, 3)},
    "three-layers": {"num_hidden_layers": 3, "windows": (None, 9, 9), "norm_before_residual": True},
    "no-features": {"final_hidden": True},
    "p-eagle": {"mask_token": 5, "num_hidden_layers": 3, "norm_before_fc": True},
    "p-eagle-of-one-layer": {"mask_token": 6, "fc_norm": True, "own_embedding": True, "hidden_size": 20},
}


def compare(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def report_of(result: Result) -> dict[str, Any]:
    """Its JSON."""
    report: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return report


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a head."""
    random_draft_model(tmp_path / "head", make_target(tmp_path / "target", "llama"), norm_output=True)
    return tmp_path / "target", tmp_path / "head"


def change(directory: Path, name: str) -> None:
    """Add noise to one stored tensor."""
    tensors = load_file(directory / "model.safetensors")
    tensors[name] += torch.randn_like(tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "family", staged([*FAMILIES, "mxfp4"], first=["llama", "mxfp4"], second=["qwen3_5_moe_text", "gemma4_text"])
)
def test_every_stage_of_a_target_agrees_with_transformers(family: str, tmp_path: Path) -> None:
    if family == "mxfp4":
        mxfp4_target(tmp_path)
    else:
        make_target(tmp_path, family)
    result = compare(tmp_path, "--json", "--against", "transformers", "--num-tokens", 6)
    report = report_of(result)
    assert result.exit_code == 0
    assert report["passed"] and report["greedy_identical"]
    names = [stage["stage"] for stage in report["stages"]]
    count = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] + 1
    assert names == [*(f"target.residual.{b}" for b in range(count)), "target.pre_head_hidden", "target.logits"]
    assert [stage["num_rows"] for stage in report["stages"]] == [53] * count + [6] * 2
    assert all(stage["cosine"] > 0.999999 and stage["max_difference"] < 1e-3 for stage in report["stages"])
    assert report["stages"][-1]["top_k_overlap"] > 0.99


def test_a_dflash_draft_model_is_refused_by_name(tmp_path: Path) -> None:
    dflash_draft_model(tmp_path / "head", make_target(tmp_path / "target", "qwen3"))
    with pytest.raises(ConfigError, match="method 'dflash' cannot be compared, those of eagle3 and peagle can"):
        record(tmp_path / "target", tmp_path / "head", [1, 2, 3])


@pytest.mark.parametrize(
    "name", staged(HEADS, first=["norms", "p-eagle"], second=["eagle-3.1", "three-layers", "no-features"])
)
def test_every_stage_of_a_head_agrees_with_plain_torch(name: str, tmp_path: Path) -> None:
    random_draft_model(tmp_path / "head", make_target(tmp_path / "target", "qwen3"), **HEADS[name])
    result = compare(tmp_path / "target", "--head", tmp_path / "head", "--json", "--num-tokens", 5)
    report = report_of(result)
    assert result.exit_code == 0, report
    earlier = range(HEADS[name].get("num_hidden_layers", 1) - 1)
    layers = [f"layers.{layer}.{part}" for layer in earlier for part in ("attn_out", "ffn_out")]
    levels = [f"draft.{level}.{stage}" for level in range(3) for stage in (*layers, *LEVEL_STAGES.values())]
    stages = {stage["stage"]: stage for stage in report["stages"] if stage["stage"].startswith("draft.")}
    assert list(stages) == ["draft.fc_out", *levels]
    assert all(stage["cosine"] > 0.999999 for stage in stages.values())
    assert stages["draft.2.logits"]["top_k_overlap"] > 0.99


def test_bfloat16_is_compared_in_bfloat16(pair: tuple[Path, Path]) -> None:
    arguments = (pair[0], "--head", pair[1], "--dtype", "bfloat16", "--json", "--num-tokens", 4)
    report = report_of(compare(*arguments, "--min-cosine", 0.99))
    assert report["passed"]
    assert report["stages"][1]["max_difference"] > 1e-4
    assert compare(*arguments, "--min-cosine", 1.0).exit_code == 1


def test_a_quantised_target_is_compared_with_a_plain_one(tmp_path: Path) -> None:
    model = make_target(tmp_path / "int4", "qwen3", hidden_size=64, intermediate_size=64, head_dim=16)
    random_draft_model(tmp_path / "head", model)
    quantise_target(tmp_path / "int4", "w4a16-zeros", model)
    model.save_pretrained(tmp_path / "plain")  # of the same numbers
    arguments = (tmp_path / "int4", "--head", tmp_path / "head", "--json", "--num-tokens", 6, "--against")
    report = report_of(compare(*arguments, tmp_path / "plain"))
    assert report["passed"] and report["greedy_identical"] and "plain by transformers" in report["against"]
    assert {"target.logits", "draft.2.logits"} < {stage["stage"] for stage in report["stages"]}
    change(tmp_path / "plain", "model.layers.1.mlp.up_proj.weight")
    result = compare(*arguments, tmp_path / "plain")
    assert result.exit_code == 1 and report_of(result)["first_beyond_tolerance"] == "target.residual.2"
    make_target(tmp_path / "other", "qwen3", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="its num_layers is 2, not 3"):
        compare(*arguments, tmp_path / "other")


@pytest.mark.second
def test_a_recording_names_the_first_layer_that_changed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, head = pair
    saved = tmp_path / "folder" / "saved.safetensors"
    assert compare(target, "--head", head, "--save", saved, "--token-ids", "5,9,3, 8", "-S", 2).exit_code == 0
    arguments = (target, "--head", head, "--against", saved, "--json")
    same = report_of(compare(*arguments))
    assert same["passed"] and same["greedy_identical"] and same["not_compared"] == []
    assert same["num_tokens"] == 20 and {"draft.0.attn_out", "draft.1.logits"} < {s["stage"] for s in same["stages"]}
    assert all(stage["max_difference"] == 0 for stage in same["stages"])
    change(target, "model.layers.1.mlp.down_proj.weight")
    result = compare(*arguments)
    found = report_of(result)
    assert result.exit_code == 1 and found["first_beyond_tolerance"] == "target.residual.2"
    loose = report_of(compare(*arguments, "--tolerance", "residual=-1", "--tolerance", "residual.3=1"))
    assert loose["first_beyond_tolerance"] == "target.residual.3"
    for wrong, message in (("fc=0.9", "part of no stage"), ("=1", "STAGE=COSINE"), ("logits=2", "-1.0<=x<=1.0")):
        assert message in compare(*arguments, "--tolerance", wrong).stderr


def test_a_recording_of_another_engine_may_hold_less_and_in_half_precision(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Logits of the last two positions, one step of three drafts in bfloat16, other drafts after the first."""
    target, head = pair
    full = record(target, head, [5, 9, 3, 8], num_tokens=6)
    first, *others = full.drafts[0]
    tensors = {
        "tokens": torch.tensor(full.tokens),
        "num_prompt": torch.tensor([4]),
        "target.logits": full.stages["target.logits"][-2:],
        "positions": torch.tensor(full.positions[:1]),
        "drafts": torch.tensor([[first, *((token + 1) % 97 for token in others)]]),
    }
    tensors |= {name: rows[:1].bfloat16() for name, rows in full.stages.items() if name.startswith("draft.")}
    save_file(tensors, tmp_path / "other.safetensors")
    arguments = (target, "--head", head, "--against", tmp_path / "other.safetensors", "--json")
    report = report_of(compare(*arguments))
    assert report["passed"]
    assert {stage["stage"]: stage["num_rows"] for stage in report["stages"]} == {
        "target.logits": 2,
        "draft.fc_out": 1,
        **{f"draft.{level}.{stage}": 1 for level in range(2) for stage in LEVEL_STAGES.values()},
    }
    assert {"target.residual.0", "draft.2.logits"} < set(report["not_compared"])
    tensors["draft.1.ffn_out"] *= 1.5
    save_file(tensors, tmp_path / "other.safetensors")
    assert report_of(compare(*arguments))["first_beyond_tolerance"] == "draft.1.ffn_out", "a wrong scale"


def test_an_executor_that_shows_no_prefill_records_the_rest(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = pair
    expected = record(target, head, [5, 9, 3, 8], num_tokens=6)
    run = ReferenceExecutor.prefill

    def without_hook(self: ReferenceExecutor, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        hook = self._hook
        self.set_hook(None)
        run(self, size)
        self.set_hook(hook)
        if first is not None:
            self.step(first)

    monkeypatch.setattr(ReferenceExecutor, "prefill", without_hook)
    found = record(target, head, [5, 9, 3, 8], num_tokens=6)
    assert set(found.stages) == set(expected.stages)
    assert {len(found.stages["target.residual.1"]), len(expected.stages["target.residual.1"]) - 4} == {5}
    assert all(each.max_difference == 0 for each in differences(*common_rows(found, expected)[:2]))


def test_a_recording_shows_a_flag_of_the_head_that_changed(pair: tuple[Path, Path]) -> None:
    """Without the normed feedback the first drafts are right and the second are not."""
    target, head = pair
    expected = record(target, head, [5, 9, 3, 8])
    config = json.loads((head / "config.json").read_text())
    config["norm_output"] = False
    (head / "config.json").write_text(json.dumps(config))
    found = record(target, head, [5, 9, 3, 8])
    furthest = {
        name: float((rows[0] - expected.stages[name][0]).abs().max())
        for name, rows in found.stages.items()
        if name.startswith("draft.")
    }
    assert furthest["draft.0.logits"] == 0
    assert furthest["draft.1.logits"] > 1e-3


def test_the_table_shows_the_stages_and_the_verdict(pair: tuple[Path, Path]) -> None:
    result = compare(pair[0], "--num-tokens", 3, "--token-ids", "1 2 3")
    assert result.exit_code == 0
    assert "target.residual.3" in result.stdout
    assert "passed: the same greedy tokens" in result.stdout


def test_a_missing_transformers_is_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'transformers.*--against FILE"):
        compare(pair[0], "--num-tokens", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "x", "--token-ids", "1"), "not both"),
        (("--token-ids", "1,x"), "not an integer"),
        (("--min-cosine", "2"), "-1.0<=x<=1.0"),
    ],
)
def test_wrong_options_are_refused(pair: tuple[Path, Path], arguments: tuple[str, ...], message: str) -> None:
    result = compare(pair[0], *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_prompt_that_cannot_be_served_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match="97"):
        compare(pair[0], "--token-ids", "1,97")
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        compare(pair[0], "--prompt", "hello")


DAMAGES: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"num_prompt": torch.tensor([6])}, "1 to the 5 tokens, got .6"),
    ({"tokens": torch.zeros(5)}, "tokens must be 1 dimensions of integers"),
    ({"positions": torch.tensor([1])}, "1 positions and 0 rows of drafts"),
    ({"target.logits": torch.zeros(5, 3)}, "5 rows, and must have at most the 4"),
    ({"draft.fc_out": torch.zeros(1, 3)}, "1 rows, and must have the 0 positions"),
    ({"target.logits": torch.zeros(3)}, "must be rows of floats"),
    ({"draft.0.attention": torch.zeros(0, 3)}, "'draft.0.attention' is no stage; stages are target.residual.B"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES)
def test_a_recording_that_is_not_one_is_refused(tmp_path: Path, change: dict[str, torch.Tensor], message: str) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"tokens": torch.arange(5), "num_prompt": torch.tensor([2]), **change}, file)
    with pytest.raises(ConfigError, match=message):
        load_recording(file)


def test_a_file_that_holds_no_recording_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with pytest.raises(ConfigError, match="--save FILE"):
        load_recording(file)
    file.write_bytes(b"\x08\0\0\0\0\0\0\0rubbish!")
    with pytest.raises(ConfigError, match="not a recording"):
        load_recording(file)
    save_file({"num_prompt": torch.zeros(3, dtype=torch.int64)}, file)
    with pytest.raises(ConfigError, match="'tokens' is missing"):
        load_recording(file)


def recording_of(tokens: tuple[int, ...], rows: torch.Tensor) -> Recording:
    """A recording of a prompt of two tokens and no head."""
    return Recording(tokens, 2, (), (), {"target.residual.0": rows, "target.logits": rows[1:].clone()})


def test_rows_that_rest_on_other_tokens_are_not_compared(tmp_path: Path) -> None:
    rows = torch.randn(4, 6)
    ours, theirs = recording_of((1, 2, 3, 4, 5), rows), recording_of((1, 2, 3, 9, 5), rows + 1)
    save_recording(theirs, tmp_path / "x.safetensors")
    found, expected, left_out = common_rows(ours, load_recording(tmp_path / "x.safetensors"))
    assert left_out == []
    assert torch.equal(found["target.residual.0"], rows[:3]) and torch.equal(found["target.logits"], rows[1:3])
    assert torch.equal(expected["target.residual.0"], rows[:3] + 1)
    with pytest.raises(ConfigError, match="different prompts"):
        common_rows(ours, recording_of((1, 7, 3, 4, 5), rows))


def test_differences_are_what_they_say() -> None:
    rows = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]])
    other = torch.tensor([[1.0, 0.5, 2.0], [0.0, 4.0, 3.0]])
    (difference,) = differences({"target.logits": rows, "only ours": rows}, {"target.logits": other})
    assert difference.num_rows == 2
    assert difference.max_difference == 1.0
    assert difference.mean_difference == pytest.approx(2.5 / 6)
    assert difference.cosine == pytest.approx(24 / 25)
    assert difference.top_k_overlap == 1.0
    with pytest.raises(ConfigError, match=r"expected shape \[1, 3\], found \[2, 3\]"):
        differences({"x": rows}, {"x": other[:1]})
