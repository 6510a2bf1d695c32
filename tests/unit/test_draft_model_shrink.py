"""Heads made smaller: which ids stay, that everything else does, and that every layout is read as before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import draft_tensors, edit_json, target_geometry, write_draft_layout
from cli_calls import answer, lowlat, refusal
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from text_tokenizers import byte_level, write_directory
from tiny_models import make_pair, make_target, random_draft_model
from tokenizers import Tokenizer

from lowlat.cli.options import bundled
from lowlat.errors import ConfigError
from lowlat.speculators.eagle3.weights import load_draft_model
from lowlat.text import TextCodec
from lowlat.text.counts import count_text, count_token_ids
from lowlat.tools.draft_model import shrink_draft_model

TARGET = target_geometry()
COUNTS = torch.zeros(40, dtype=torch.int64)


def full_tensors() -> dict[str, torch.Tensor]:
    """A head that drafts the whole vocabulary of 40."""
    tensors = {name: value for name, value in draft_tensors(draft_vocab=40).items() if name not in ("d2t", "t2d")}
    return tensors | {"lm_head.weight": torch.randn(40, 16)}


@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("layout", ["safeai", "specforge", "modelopt", "speculators"])
def test_every_layout_keeps_all_but_its_vocabulary(layout: str, has_map: bool, tmp_path: Path) -> None:
    write_draft_layout(tmp_path / "head", layout, draft_tensors(draft_vocab=20) if has_map else full_tensors())
    (tmp_path / "head" / "LICENSE").write_text("free")
    before = load_draft_model(tmp_path / "head", TARGET)
    known = before.weights["draft_model.draft_to_target"].tolist()
    counts = COUNTS.index_fill(0, torch.tensor(known[3:10]), 5)
    counts[known[15]] = 9
    made = shrink_draft_model(tmp_path / "head", tmp_path / "out", counts, 6)
    after = load_draft_model(tmp_path / "out", TARGET)
    expected = sorted([known[15], *known[3:8]])  # the most frequent, then the lowest of the equal ones
    assert after.weights["draft_model.draft_to_target"].tolist() == expected == made.new_ids.tolist()
    assert made.old_ids.tolist() == known and made.not_kept == ()
    rows = [known.index(token) for token in expected]
    for name, value in before.weights.items():
        if name == "draft_model.lm_head.weight":
            value = value[rows]
        if name != "draft_model.draft_to_target":
            assert torch.equal(after.weights[name], value), name
    old, new = (load_file(tmp_path / part / "model.safetensors") for part in ("head", "out"))
    assert set(new) == set(old) | {"d2t", "t2d"}
    assert new["d2t"].dtype == torch.int64 and new["t2d"].dtype == torch.bool
    assert torch.equal(new["t2d"].nonzero().reshape(-1), torch.arange(6) + new["d2t"])
    assert all(new[name].dtype == old[name].dtype for name in old)
    texts = [json.loads((tmp_path / part / "config.json").read_text()) for part in ("head", "out")]
    assert texts[1] == {**texts[0], "draft_vocab_size": 6} and list(texts[1]) == list(texts[0])
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    assert made.new_bytes == sum(value.nbytes for value in new.values())
    assert made.old_bytes == sum(value.nbytes for value in old.values())
    assert made.lm_head_row_bytes == 16 * 4
    assert {path.name for path in tmp_path.iterdir()} == {"head", "out"}


def test_shrinking_twice_is_shrinking_once(tmp_path: Path) -> None:
    write_draft_layout(tmp_path / "head", "specforge", full_tensors())
    counts = torch.randperm(40)
    shrink_draft_model(tmp_path / "head", tmp_path / "twenty", counts, 20)
    shrink_draft_model(tmp_path / "twenty", tmp_path / "twice", counts, 7)
    shrink_draft_model(tmp_path / "head", tmp_path / "once", counts, 7)
    twice, once = (load_file(tmp_path / name / "model.safetensors") for name in ("twice", "once"))
    assert set(twice) == set(once) and all(torch.equal(twice[name], once[name]) for name in once)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_an_lm_head_takes_rows_of_its_targets(tied: bool, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama", tie_word_embeddings=tied)
    random_draft_model(tmp_path / "head", target, own_lm_head=False, captures=(0, 1, 2))
    edit_json(tmp_path / "head" / "config.json", draft_vocab_size=None)
    counts = torch.arange(97)
    with pytest.raises(ConfigError, match=r"no lm_head\.weight of its own.*--target DIR"):
        shrink_draft_model(tmp_path / "head", tmp_path / "out", counts, 10)
    shrink_draft_model(tmp_path / "head", tmp_path / "out", counts, 10, keep=[3], target=tmp_path / "target")
    new = load_file(tmp_path / "out" / "model.safetensors")
    ids = [3, *range(88, 97)]
    assert torch.equal(new["lm_head.weight"], target.lm_head.weight[ids])
    assert (torch.arange(10) + new["d2t"]).tolist() == ids


def test_what_was_tied_is_so_no_more(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama", tie_word_embeddings=True, num_hidden_layers=8)
    random_draft_model(tmp_path / "head", target, own_lm_head=False)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["transformer_layer_config"]["tie_word_embeddings"] = True
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    shrink_draft_model(tmp_path / "head", tmp_path / "out", torch.arange(97), 10, target=tmp_path / "target")
    changed = json.loads((tmp_path / "out" / "config.json").read_text())
    assert changed["transformer_layer_config"]["tie_word_embeddings"] is False


def test_ids_that_must_stay(tmp_path: Path) -> None:
    write_draft_layout(tmp_path / "head", "safeai", draft_tensors(draft_vocab=20))
    known = load_draft_model(tmp_path / "head", TARGET).weights["draft_model.draft_to_target"].tolist()
    absent = next(token for token in range(40) if token not in known)
    counts = COUNTS.index_fill(0, torch.tensor(known[:8]), 100)
    made = shrink_draft_model(tmp_path / "head", tmp_path / "out", counts, 4, keep=[known[19], known[12], absent])
    assert made.new_ids.tolist() == [known[0], known[1], known[12], known[19]]
    assert made.not_kept == (absent,)
    with pytest.raises(ConfigError, match="draft_vocab 2 has no room for the 3 ids that must stay"):
        shrink_draft_model(tmp_path / "head", tmp_path / "more", counts, 2, keep=known[:3])


def _spoil_map(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "d2t": tensors["d2t"] + 30}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("draft_vocab", "spoil", "message"),
    [
        (0, None, "draft_vocab must be from 1 to 11, below the draft model's own, got 0"),
        (12, None, "draft_vocab must be from 1 to 11, below the draft model's own, got 12"),
        (4, lambda head: (head.parent / "out").mkdir() or (head.parent / "out" / "x").touch(), "not empty"),
        (4, lambda head: (head.parent / "out").touch(), "is there already"),
        (4, _spoil_map, "tensor 'd2t': expected offsets"),
        (4, lambda head: edit_json(head / "config.json", vocab_size=...), "names no vocab_size: give the target"),
        (4, lambda head: (head / "config.json").unlink(), "no such file"),
    ],
)
def test_refusals_leave_nothing_behind(draft_vocab: int, spoil: Any, message: str, tmp_path: Path) -> None:
    write_draft_layout(tmp_path / "head", "safeai")
    if spoil is not None:
        spoil(tmp_path / "head")
    present = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=message):
        shrink_draft_model(tmp_path / "head", tmp_path / "out", COUNTS, draft_vocab)
    assert {path.name for path in tmp_path.iterdir()} == present


def test_heads_that_are_not_eagle3_are_refused_by_name(tmp_path: Path) -> None:
    tensors = draft_tensors()
    tensors["layers.0.self_attn.q_a_proj.weight"] = torch.ones(2, 2)
    write_draft_layout(tmp_path / "head", "modelopt", tensors)
    with pytest.raises(ConfigError, match="latent attention"):
        shrink_draft_model(tmp_path / "head", tmp_path / "out", COUNTS, 4)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=400), st.sampled_from(["txt", "json"]))
def test_every_token_is_counted_once(tmp_path_factory: pytest.TempPathFactory, ids: list[int], suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"ids.{suffix}"
    path.write_text(json.dumps([ids[:7], *ids[7:]]) if suffix == "json" else "\n".join(map(str, ids)))
    counts = count_token_ids(path, 31)
    expected = torch.bincount(torch.tensor(ids), minlength=31)
    assert torch.equal(counts.chosen_by + counts.held_out, expected)
    if len(ids) > 30:
        assert 0 < int(counts.held_out.sum()) < len(ids) / 4
    everything = counts.coverage(torch.arange(31))
    assert everything == (1.0 if int(counts.held_out.sum()) else None)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"1 2 31", "token id 31 is not from 0 to 30"),
        ("a.txt", b"1 x", "'x' is not a token id"),
        ("a.txt", b"1 99999999999999999999", "is not a token id"),
        ("a.txt", b"", "no tokens"),
        ("a.txt", b"1 \xff", "not UTF-8"),
        ("a.json", b'{"a": 1}', "expected a list of token ids"),
        ("a.json", b"[[1, true]]", "True is not a token id"),
        ("a.json", b"[1, -4]", "token id -4 is not"),
        ("a.json", b"[1,", "is not valid JSON"),
        ("a.json", b"[1e400]", "inf is not a token id"),
    ],
)
def test_files_that_hold_no_ids(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        count_token_ids(tmp_path / name, 31)
    with pytest.raises(ConfigError, match="cannot be read"):
        count_token_ids(tmp_path / "absent.txt", 31)


def test_text_is_counted_with_the_models_tokenizer(tmp_path: Path) -> None:
    codec = TextCodec.load(write_directory(tmp_path, byte_level(), chat_template="x"))
    assert codec is not None
    text = "To be, or not to be, that is the question.\n" * 200
    (tmp_path / "text.txt").write_text(text)
    counts = count_text(tmp_path / "text.txt", codec, codec.vocab_size)
    alone = torch.bincount(torch.tensor(codec.encode(text, add_special_tokens=False)), minlength=codec.vocab_size)
    assert torch.equal(counts.chosen_by + counts.held_out, alone)
    assert 0 < int(counts.held_out.sum()) < 0.2 * int(alone.sum())
    codec.close()


@pytest.mark.wide
def test_the_bundled_head_shrinks_and_both_are_measured(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([list(range(1, 3000)), [7, 8, 9] * 500]))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The President shall\nimport os\n")
    found = answer(
        "head", "shrink", bundled("head"), "--out", tmp_path / "small", "--draft-vocab", 512, "--target",
        bundled("target"), "--token-ids", tmp_path / "ids.json", "--prompts", prompts, "--max-tokens", 12,
        "--device", "cpu", "--keep", "4000", "--json",
    )  # fmt: skip
    assert (found["old"]["draft_vocab"], found["new"]["draft_vocab"]) == (4096, 512)
    assert found["old"]["coverage"] == 1.0 > found["new"]["coverage"] > 0.2
    assert found["old"]["lm_head_bytes"] == 8 * found["new"]["lm_head_bytes"]
    assert found["counted_tokens"] + found["held_out_tokens"] == 2999 + 1500
    measured = found["measured"]
    assert measured["identical"] is True and measured["num_prompts"] == 2
    assert 0 < measured["new"]["mean_acceptance_length"] <= 4 and measured["without"]["draft_ms"] == 0
    assert measured["old"]["draft_ms"] > 0 and measured["new"]["draft_ms"] > 0
    again = answer(
        "head", "shrink", bundled("chat_head"), "--out", tmp_path / "chat", "--draft-vocab", 1000,
        "--token-ids", tmp_path / "ids.json", "--json",
    )  # fmt: skip
    assert again["old"]["draft_vocab"] == 4096  # of 49152: it has a map already


def test_chat_tokens_stay_when_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())  # the other tests' stays as it is
    tokenizer.add_special_tokens(["<|start|>", "<|unused|>"])
    vocab = tokenizer.get_vocab_size()
    target = tmp_path / "target"
    model = make_target(target, "llama", vocab_size=vocab, num_hidden_layers=2, eos_token_id=5)
    write_directory(target, tokenizer, chat_template="<|start|>{{ messages[0].content }}")
    random_draft_model(tmp_path / "head", model, captures=(0, 1, 2))
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 100)
    arguments = ("head", "shrink", tmp_path / "head", "--draft-vocab", 12, "--target", target)
    text = ("--text", tmp_path / "text.txt")
    plain = answer(*arguments, "--out", tmp_path / "a", *text, "--json")
    kept = answer(*arguments, "--out", tmp_path / "b", *text, "--keep-chat-tokens", "--json")
    assert (plain["kept"], kept["kept"]) == (1, 2)
    start, unused = tokenizer.token_to_id("<|start|>"), tokenizer.token_to_id("<|unused|>")
    for name, expected in (("a", {5}), ("b", {5, start})):
        ids = (torch.arange(12) + load_file(tmp_path / name / "model.safetensors")["d2t"]).tolist()
        assert set(ids) & {5, start, unused} == expected
    result = lowlat(*arguments, "--out", tmp_path / "c", *text)
    assert result.exit_code == 0 and "coverage of held-out tokens" in result.stdout


def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    (tmp_path / "ids.txt").write_text("1 2 3")
    base = ("head", "shrink", pair.head, "--out", tmp_path / "out", "--draft-vocab", 4)
    ids = ("--token-ids", tmp_path / "ids.txt")
    assert "one of --text and --token-ids" in refusal(*base)
    assert "--text needs --target DIR" in refusal(*base, "--text", tmp_path / "ids.txt")
    assert "--prompts needs --target DIR" in refusal(*base, *ids, "--prompts", tmp_path / "ids.txt")
    assert "no tokenizer.json" in refusal(*base, "--text", tmp_path / "ids.txt", "--target", pair.target)
    assert "no tokenizer.json" in refusal(*base, *ids, "--target", pair.target, "--keep-chat-tokens")
    assert "token id 97 is not from 0 to 96" in refusal(*base, *ids, "--keep", 97)
    assert not (tmp_path / "out").exists()
