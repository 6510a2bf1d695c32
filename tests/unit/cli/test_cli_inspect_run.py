"""`lowlat inspect run`: whether a pair speculates, and why not."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from cli_calls import answer, lowlat, refusal
from safetensors.torch import load_file, save_file
from stages import staged

from lowlat.cli.options import bundled
from lowlat.cli.reports.activity import Activity, guess_rate

SHORT = ("--num-prompts", 2, "--max-tokens", 32)
BRIEF = ("--num-prompts", 1, "--max-tokens", 6)  # enough where nothing is drafted
CASES: dict[str, tuple[tuple[object, ...], str]] = {
    "not_asked_for": ((bundled("target"), *BRIEF), "--draft-model MODEL"),
    "refused": ((bundled("target"), "--head", bundled("chat_head"), *BRIEF), "576 is not the target's 320"),
    "zero_depth": (("-S", 0, *BRIEF), "-S"),
    "draft_limit": (("--max-draft-tokens", 0, *BRIEF), "--max-draft-tokens"),
    "simulated": (("--set", "simulated_acceptance=0.7", *SHORT), "nothing about the pair"),
    "no_drafts": (("--num-prompts", 2, "--max-tokens", 1), "the 2 tokens left no step"),
    "few_drafts": (("--num-prompts", 1, "--max-tokens", 4, "--temperature", 100, "--seed", 1), "too few to tell"),
}


@pytest.mark.second
def test_the_bundled_pair_speculates() -> None:
    report = answer("inspect", "run", "--json", *SHORT, "-S", 2)
    found = msgspec.convert(report, Activity)
    assert found.active and not found.reasons
    assert (found.num_speculative_tokens, found.num_prompts, found.completion_tokens) == (2, 2, 64)
    assert found.tokens_per_s > 0 and len(found.acceptance_by_position) == 2
    assert found.guess_rate is not None and found.guess_rate < 0.1 < found.acceptance_by_position[0]
    assert found.eagle_speculation is not None
    assert found.mean_acceptance_length == found.eagle_speculation["mean_acceptance_length"] > 1.5
    assert found.eagle_speculation["num_drafts"] <= found.num_steps < 62
    assert len(found.texts) == 2 and all(isinstance(text.answer, str) and text.answer for text in found.texts)
    shown = lowlat("inspect", "run", "--num-prompts", 1, "--max-tokens", 16, "-S", 2).stdout
    text = found.texts[0]
    assert str(text.prompt) in shown and str(text.answer)[:20] in shown


@pytest.mark.wide
@pytest.mark.parametrize("code", staged(CASES, first=["refused", "few_drafts", "no_drafts"]))
def test_a_pair_that_does_not_speculate_says_why(code: str) -> None:
    arguments, text = CASES[code]
    found = msgspec.convert(answer("inspect", "run", "--json", *arguments, code=3), Activity)
    (reason,) = found.reasons
    assert not found.active and (reason.code, text in reason.text) == (code, True), reason
    assert found.completion_tokens > 0
    assert (found.eagle_speculation is None) == (code not in ("simulated", "few_drafts"))


def test_ngram_drafts_nothing_where_no_text_repeats_itself(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text("[[5, 6, 7, 8]]")
    ngram = ("inspect", "run", bundled("target"), "--method", "ngram", "--prompts", tmp_path / "prompts.json")
    (reason,) = answer(*ngram, "--max-tokens", 3, "--json", code=3)["reasons"]
    assert reason["code"] == "no_drafts" and "repeats itself" in reason["text"]


@pytest.mark.wide
def test_a_draft_model_that_only_guesses_is_not_active(tmp_path: Path) -> None:
    """Its LM head's rows belong to other ids."""
    head = tmp_path / "head"
    shutil.copytree(bundled("head"), head)
    tensors = load_file(head / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1234, 0)
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    result = lowlat("inspect", "run", bundled("target"), "--head", head, *SHORT)
    assert result.exit_code == 3
    assert "speculation is NOT active" in result.stdout and "`lowlat doctor`" in result.stdout
    assert "0.0%" in result.stdout


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    assert "needs a draft model" in refusal("inspect", "run", bundled("target"), "-S", 2)
    (tmp_path / "x.json").write_text(json.dumps([]))
    assert "x.json" in refusal("inspect", "run", "--prompts", tmp_path / "x.json")


def test_guesses_are_right_as_often_as_two_tokens_are_the_same() -> None:
    assert guess_rate([[1, 1], [2, 3]]) == pytest.approx((4 + 1 + 1) / 16)
    assert guess_rate([[]]) is None
