"""Training for long contexts: long texts, rows that attend piece by piece, windows, YaRN, and losses by position."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_target
from tiny_training import tiny_target
from torch import Tensor
from torch.nn import functional

from lowlat import SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.models.rope import rope_tables
from lowlat.models.target import read_model_config
from lowlat.speculators.methods import load_speculator
from lowlat.tools.train import draft_model, eagle3
from lowlat.tools.train.corpus import END_OF_TEXT, is_held_out, read_documents
from lowlat.tools.train.eagle3 import DraftSizes, Eagle3DraftModel, load_draft_model, rotation_of, save_draft_model
from lowlat.tools.train.long import losses as position_loss
from lowlat.tools.train.long.texts import is_unseen, join_neighbours, main, named, read_texts, spread, withhold
from lowlat.tools.train.rows import mix_batches
from lowlat.tools.train.target import extend_target, rows_of, train
from lowlat.tools.train.teacher import Teacher

SIZES = DraftSizes(
    hidden=24, target_hidden=24, intermediate=40, heads=4, kv_heads=2, head_dim=8, vocabulary=257,
    draft_vocabulary=257, max_context=64, rope_theta=500.0, rms_norm_eps=1e-5, boundaries=(2, 3, 4),
)  # fmt: skip


def documents(count: int) -> list[str]:
    return [f"document {i} has " + "some words " * (i % 7 + 1) for i in range(count)]


def test_neighbours_make_long_texts_and_none_is_on_both_sides(tmp_path: Path) -> None:
    given = documents(600)
    (tmp_path / "text.txt").write_text(f"\n{END_OF_TEXT}\n".join(given), encoding="utf-8")
    out, held_out = tmp_path / "long.txt.xz", tmp_path / "held_out.json.xz"
    sizes = ["--characters", "300", "--megabytes", "0.005", "--withhold", "Chosen=document 103 "]
    main(["--text", str(tmp_path / "text.txt"), "--out", str(out), "--held-out", str(held_out), *sizes])
    kept, texts = read_documents(out), read_texts(held_out)
    assert 4000 < sum(map(len, kept)) <= 5000 and all(len(text) >= 300 for text in [*kept, *texts.values()])
    assert texts["Chosen"].startswith("document 103 has") and not is_unseen("Chosen")
    unseen = [part for name, text in texts.items() if is_unseen(name) for part in text.split("\n\n")]
    assert unseen and all(is_held_out(part) for part in unseen)
    measured = {part for text in texts.values() for part in text.split("\n\n")}
    assert measured.isdisjoint(part for text in kept for part in text.split("\n\n"))


def test_what_is_withheld_is_taken_out() -> None:
    given = documents(20)
    assert list(join_neighbours(given[:3], len("\n\n".join(given[:3])))) == ["\n\n".join(given[:3])]
    assert list(join_neighbours(given[:3], len("\n\n".join(given[:3])) + 1)) == []
    found, others = withhold(given, {"a": "document 4 ", "b": "document 12 "}, 60)
    assert found["a"].startswith(given[4]) and not set(found["a"].split("\n\n")) & set(others)
    assert len(others) + sum(text.count("\n\n") + 1 for text in found.values()) == 20
    with pytest.raises(ValueError, match="no document begins with 'novel'"):
        withhold(given, {"a": "novel"}, 60)
    with pytest.raises(ValueError, match="fewer than 9000 characters"):
        withhold(given, {"a": "document 4 "}, 9000)
    assert spread(range(11), 4) == [0, 2, 5, 8] and spread("abc", 9) == ["a", "b", "c"]
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
        named("nothing")


def reference_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None) -> Tensor:
    """Every row by itself: step 0's rows up to j - k, row j - k + i of each later step i, those in the window."""
    step, length = len(keys) - 1, query.shape[2]
    out = torch.zeros_like(query)
    for j in range(length):
        seen = [(0, row) for row in range(j - step + 1)] + [(i, j - step + i) for i in range(1, step + 1)]
        seen = [(i, row) for i, row in seen if row >= 0 and (window is None or row > j - window)]
        key, value = (torch.stack([rows[i][:, :, row] for i, row in seen], dim=2) for rows in (keys, values))
        scores = (query[:, :, j : j + 1] * key).sum(-1) / query.shape[-1] ** 0.5
        out[:, :, j] = (scores.softmax(-1)[..., None] * value).sum(2)
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_rows_that_attend_piece_by_piece_see_what_they_should(
    step: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle3, "PIECE", 8)
    generator = torch.Generator().manual_seed(step)

    def rows() -> Tensor:
        return torch.randn(2, 3, 21, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    query, keys, values = rows(), [rows() for _ in range(step + 1)], [rows() for _ in range(step + 1)]
    weights = torch.randn(2, 3, 21, 8, generator=generator, dtype=torch.float64)
    found, expected = (attend(query, keys, values, window) for attend in (eagle3._attend, reference_attention))
    torch.testing.assert_close(found, expected)
    inputs = (query, *keys, *values)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


def test_a_stretched_and_windowed_draft_model_is_read_as_it_was_trained(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "llama", seed=1)
    target = read_model_config(tmp_path / "target")
    sizes = replace(
        SIZES, hidden=target.hidden_size, target_hidden=target.hidden_size, vocabulary=target.vocab_size,
        draft_vocabulary=target.vocab_size, yarn_factor=4.0, max_context=256, window=24,
        boundaries=(2, 3, target.num_layers),
    )  # fmt: skip
    save_draft_model(Eagle3DraftModel(sizes), tmp_path / "head")
    assert load_draft_model(tmp_path / "head").sizes == sizes
    loaded = load_speculator(SpeculativeConfig(method="eagle3", model=tmp_path / "head"), target)
    config = loaded.speculator.draft_config
    assert config is not None and config.windows == (24,) and config.attention.rope == sizes.rope
    cos, sin = rotation_of(sizes, torch.arange(256))
    for found, expected in zip((cos, sin), rope_tables(config.attention.rope, sizes.head_dim, 256), strict=True):
        torch.testing.assert_close(found[:, : sizes.head_dim // 2], expected)
    plain = rotation_of(SIZES, torch.arange(256))[0]
    assert not torch.allclose(plain, cos, atol=0.1)


@pytest.mark.second
def test_an_extended_target_learns_rows_of_several_lengths(tmp_path: Path) -> None:
    model = extend_target(str(tiny_target(tmp_path)), 4)
    model.save_pretrained(tmp_path / "extended")
    rope = read_model_config(tmp_path / "extended").attention.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    assert rope.attention_factor == pytest.approx(model.model.rotary_emb.attention_scaling)
    assert read_model_config(tmp_path / "extended").max_position == 256
    with pytest.raises(ConfigError, match="rope_type yarn"):
        extend_target(str(tmp_path / "extended"), 2)
    assert rows_of(8, [64, 128, 512, 2048]) == [8, 4, 1, 1]
    text = (np.arange(4000) % 17).astype(np.int32)
    options = argparse.Namespace(
        device="cpu", compile=False, learning_rate=1e-2, minutes=0.03, length=[32, 128], rows=8, log_every=1
    )
    log = train(model, text, text[:64].reshape(2, 32), options)
    assert log[-1]["loss"] < log[0]["loss"] and log[-1]["held_out"] > 0


def test_losses_stand_by_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_target(tmp_path / "target")
    texts = {"unseen 0": "a few words " * 200, "unseen 1": "too short", "Novel": "more words " * 200}
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    given = ["--target", f"tiny={directory}", "--texts", str(tmp_path / "texts.json"), "--length", "60"]
    position_loss.main([*given, "--device", "cpu", "--out", str(tmp_path / "out" / "loss.json")])
    rows = json.loads((tmp_path / "out" / "loss.json").read_text())["rows"]
    assert [(row["texts"], row["num_texts"], row["from"], row["to"]) for row in rows] == [
        ("unseen", 1, 0, 60),
        ("withheld", 1, 0, 60),
    ]
    teacher = Teacher.load(directory, "cpu")
    tokens = teacher.tokenizer(texts["Novel"], add_special_tokens=False)["input_ids"][:60]
    with torch.no_grad():
        logits = teacher.model(torch.tensor([tokens])).logits[0, :-1]
    assert rows[1]["loss"] == pytest.approx(float(functional.cross_entropy(logits, torch.tensor(tokens[1:]))), abs=1e-3)
    assert position_loss.ranges_of(3000) == [(0, 1024), (1024, 2048), (2048, 3000)]


def test_text_alone_is_trained_on_where_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, text = tiny_target(tmp_path / "target"), tmp_path / "text.txt"
    text.write_text(f"\n{END_OF_TEXT}\n".join(documents(300)), encoding="utf-8")
    save_draft_model(Eagle3DraftModel(SIZES), tmp_path / "start")
    given = f"--target {directory} --text {text} --start {tmp_path / 'start'} --out {tmp_path / 'head'} --device cpu"
    sizes = "--yarn 2 --window 16 --rows 4 --length 32 --text-length 64 128 --generated-share 0 --steps 4 --ttt-steps 2"
    monkeypatch.setattr("sys.argv", ["draft_model", *given.split(), *sizes.split()])
    draft_model.main()
    found = load_draft_model(tmp_path / "head").sizes
    assert (found.yarn_factor, found.window, found.max_context) == (2.0, 16, 128)
    log = json.loads((tmp_path / "head" / "loss.json").read_text())["log"]
    assert log[-1]["step"] == 4 and len(log[-1]["match_by_step"]) == 2
    none = torch.zeros(0, 33, dtype=torch.int32), torch.zeros(0, 33, dtype=torch.bool)
    batches = mix_batches(
        np.arange(3000, dtype=np.int32) % 250, none, batch=4, length=32, text_lengths=(64, 128), own_share=0
    )
    assert [next(batches)[0].shape for _ in range(3)] == [(2, 65), (1, 129), (2, 65)]
