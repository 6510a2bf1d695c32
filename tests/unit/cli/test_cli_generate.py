"""`lowlat generate`: the runtime's own tokens, streamed or as JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_calls import answer, lowlat, refusal
from click.testing import CliRunner
from text_tokenizers import byte_level
from tiny_models import PairPaths, make_target, random_draft_model

from lowlat import Runtime, SamplingParams
from lowlat.cli import cli
from lowlat.cli.options import bundled
from lowlat.engine.loading import geometry, loading


def expected_tokens(pair: PairPaths, prompt: list[int], params: SamplingParams, **options: Any) -> list[int]:
    tokens: list[int] = []
    with Runtime.load(pair.target, max_batch=1, max_context=128, **options) as runtime:
        runtime.submit(prompt, params)
        while runtime.busy:
            tokens.extend(token for output in runtime.step() for token in output.token_ids)
    return tokens


def test_generate_answers_in_json_with_the_runtimes_own_tokens(pair: PairPaths) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, top_k=20, seed=5, logit_bias={3: 2.0}, presence_penalty=0.5)
    found = answer(
        *("generate", pair.target, "--head", pair.head, "-S", 2, "--token-ids", "5,6 7", "--max-tokens", 20),
        *("--temperature", 0.8, "--top-k", 20, "--seed", 5, "--logit-bias", "3=2", "--presence-penalty", 0.5),
        *("--logprobs", 2, "--json"),
    )
    assert found["token_ids"] == expected_tokens(pair, [5, 6, 7], params)
    assert found["text"] is None and found["finish_reason"] == "length"
    assert found["metrics"]["prompt_tokens"] == 3 and found["metrics"]["completion_tokens"] == 20
    assert found["metrics"]["seed"] == 5
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in found["logprobs"])
    assert found["metrics"]["eagle_speculation"]["drafted_by_position"][2] == 0


def test_a_target_is_rounded_at_load_where_that_is_asked_for(pair: PairPaths) -> None:
    params, line = SamplingParams(max_tokens=20), ("generate", pair.target, "--token-ids", "5,6 7", "--max-tokens", 20)
    found = answer(*line, "--quantize", "fp8", "--quantize-lm-head", "--json")["token_ids"]
    assert found == expected_tokens(pair, [5, 6, 7], params, quantize="fp8", quantize_lm_head=True)
    assert found != expected_tokens(pair, [5, 6, 7], params)


def test_a_depth_of_zero_is_plain_decoding_with_a_draft_model_and_without(pair: PairPaths) -> None:
    common = ("generate", pair.target, "--token-ids", "5,6,7", "--max-tokens", 12, "--json")
    plain = answer(*common)
    for arguments in (("-S", 0), ("-S", 0, "--head", pair.head), ("-S", 0, "--draft-model", pair.head)):
        found = answer(*common, *arguments)
        assert found["token_ids"] == plain["token_ids"] and "eagle_speculation" not in found["metrics"]


def test_generate_drafts_n_grams_without_a_head(pair: PairPaths) -> None:
    sampling = ("--token-ids", "5,6,7,5,6,7,5,6", "--max-tokens", 30, "--temperature", 0)
    common = ("generate", pair.target, *sampling, "--json")
    found = answer(*common, "--method", "ngram", "-S", 4, "--set", "prompt_lookup_min=1")
    plain = answer(*common)
    assert found["token_ids"] == plain["token_ids"]
    assert found["metrics"]["num_steps"] < plain["metrics"]["num_steps"] == 29
    assert found["metrics"]["eagle_speculation"]["total_accepted_tokens"] > 0
    assert "of method 'eagle3', and method is 'ngram'" in refusal(*common, "--method", "ngram", "--head", pair.head)


def test_generate_streams_token_ids_without_a_tokenizer(pair: PairPaths) -> None:
    result = lowlat("generate", pair.target, "--token-ids", "5,6,7", "--max-tokens", 6)
    assert result.exit_code == 0
    found = [int(token) for token in result.stdout.split()]
    assert found == expected_tokens(pair, [5, 6, 7], SamplingParams(max_tokens=6))
    assert "6 tokens" in result.stderr and "running on cpu" in result.stderr


def test_generate_streams_the_same_text_from_prompt_file_and_stdin(talker: Path, tmp_path: Path) -> None:
    text = "naïve fox"
    (tmp_path / "prompt").write_text(text, encoding="utf-8")
    common = ("generate", talker, "--max-tokens", 12)
    whole = answer(*common, "--prompt", text, "--json")["text"]
    assert whole
    for arguments in (("--prompt", text), ("--prompt-file", tmp_path / "prompt")):
        assert lowlat(*common, *arguments).stdout == whole + "\n"
    options = [str(argument) for argument in common]
    assert CliRunner().invoke(cli, [*options, "--prompt-file", "-"], input=text.encode()).stdout == whole + "\n"
    (tmp_path / "broken").write_bytes(b"\xff")
    assert "is not UTF-8: byte 0" in refusal(*common, "--prompt-file", tmp_path / "broken")


def test_chat_goes_through_the_template(talker: Path) -> None:
    tokenizer = byte_level()
    common = ("generate", talker, "--max-tokens", 8, "--json")
    found = answer(*common, "--chat", "--prompt", "hello", "--system", "be kind")
    ids = tokenizer.encode("[system] be kind\n[user] hello\n> ", add_special_tokens=False).ids
    assert found["metrics"]["prompt_tokens"] == len(ids)
    assert found["token_ids"] == answer(*common, "--token-ids", ",".join(map(str, ids)))["token_ids"]


@pytest.mark.second
def test_a_tree_gives_the_same_tokens_and_its_own_depth(pair: PairPaths, tmp_path: Path) -> None:
    tree = tmp_path / "tree.yaml"
    tree.write_text("[[0], [1], [0, 0], [0, 1]]")
    common = ("generate", pair.target, "--token-ids", "9,8", "--max-tokens", 24, "--json")
    plain, with_tree = answer(*common), answer(*common, "--head", pair.head, "--tree", tree)
    assert with_tree["token_ids"] == plain["token_ids"]
    assert "eagle_speculation" not in plain["metrics"]
    assert with_tree["metrics"]["eagle_speculation"]["drafted_by_position"][1] > 0
    grown = answer(*common, "--head", pair.head, "--dynamic-tree-max-topk", 3, "--set", "max_draft_len=4")
    assert grown["token_ids"] == plain["token_ids"]
    assert grown["metrics"]["eagle_speculation"]["drafted_by_position"][3] > 0
    limited = ("--head", pair.head, "--tree", tree, "--set", "max_decoding_tokens=4")
    assert "the limit is 4 (max_decoding_tokens)" in refusal(*common, *limited)
    assert "num_speculative_tokens is 3" in refusal(*common, "--head", pair.head, "--tree", tree, "-S", 3)


def test_an_unfit_head_is_one_warning_and_the_baseline(pair: PairPaths, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", "llama", hidden_size=48)
    random_draft_model(tmp_path / "head", other)
    common = ("generate", pair.target, "--token-ids", "9,8", "--max-tokens", 6)
    result = lowlat(*common, "--head", tmp_path / "head", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert "2048" not in found["speculation_error"] and "target_hidden_size 48" in found["speculation_error"]
    assert result.stderr.count("warning: speculation is off") == 1
    assert "eagle_speculation" not in found["metrics"]
    assert "target_hidden_size 48" in refusal(*common, "--head", tmp_path / "head", "--strict")


def test_simulated_acceptance_is_marked(pair: PairPaths) -> None:
    common = ("generate", pair.target, "--head", pair.head, "--token-ids", "9", "--max-tokens", 8)
    found = answer(*common, "--set", "simulated_accept_length=2.5", "--json")
    assert found["simulated"] is True and found["metrics"]["eagle_speculation"]["simulated"] is True
    assert "the text means nothing" in lowlat(*common, "--set", "simulated_accept_length=2.5").stderr


def test_traces_go_to_stderr_only_when_asked(pair: PairPaths) -> None:
    common = ("generate", pair.target, "--head", pair.head, "--token-ids", "9", "--max-tokens", 4)
    plain, traced = lowlat(*common), lowlat(*common, "--trace", "step, accept,kv,tree")
    assert plain.stdout == traced.stdout
    for part in ("step 1:", "accept: slot 0", "kv: ", "tree: slot 0"):
        assert part in traced.stderr and part not in plain.stderr


@pytest.mark.second
def test_bars_are_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ",".join(str(token % 97) for token in range(600))
    arguments = ("generate", bundled("target"), "--token-ids", prompt, "--max-tokens", 2, "--max-context", 640)
    plain = lowlat(*arguments)
    assert plain.exit_code == 0, plain.stderr
    assert "prefill" not in plain.stderr and "loading" not in plain.stderr
    updates: list[tuple[int, int | None]] = []
    monkeypatch.setattr("lowlat.cli.running.LONG_PREFILLS", 1)
    shapes = geometry.make_geometry
    monkeypatch.setattr(loading, "make_geometry", lambda *given: replace(shapes(*given), max_prefill_chunks=4))
    monkeypatch.setattr("lowlat.cli.running.progress_bar", lambda _text, **_: _Recorder(updates))
    assert lowlat(*arguments).stdout == plain.stdout
    assert updates[0] == updates[-1] == (0, None) and len(updates) > 2  # of the load, and of the prefill


class _Recorder:
    """A bar that keeps what it is told."""

    def __init__(self, updates: list[tuple[int, int | None]]) -> None:
        self.updates = updates

    def __enter__(self) -> Any:
        return lambda done, total: self.updates.append((done, total))

    def __exit__(self, *_error: object) -> None:
        pass
