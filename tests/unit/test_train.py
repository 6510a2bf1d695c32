"""Training: the split, packing, and that what is drafted at once means what is drafted alone."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper_draft_model import PaperDraftModel
from stages import staged
from tiny_dflash import PaperDflash, PaperDspark
from tiny_models import make_target, transformers_logits
from tiny_training import tiny_target
from torch import Tensor

from lowlat import SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.models.target import read_model_config
from lowlat.speculators.methods import draft_method, load_speculator
from lowlat.tools.train.corpus import domain_of, is_held_out, pack, read_documents, split, tokenize
from lowlat.tools.train.draft_model import boundaries_of
from lowlat.tools.train.eagle3 import DraftSizes, Eagle3DraftModel, load_draft_model, save_draft_model
from lowlat.tools.train.evaluate import draft_matches, loops, walk_cycles
from lowlat.tools.train.parallel import ParallelDraftModel, ParallelForm, parallel_loss, save_parallel_model
from lowlat.tools.train.target import learning_rate_scale
from lowlat.tools.train.teacher import Teacher


def tiny_sizes(draft_vocabulary: int = 20) -> DraftSizes:
    return DraftSizes(
        hidden=24,
        target_hidden=24,
        intermediate=40,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocabulary=32,
        draft_vocabulary=draft_vocabulary,
        max_context=64,
        rope_theta=500.0,
        rms_norm_eps=1e-5,
        boundaries=(2, 3, 4),
    )


def tiny_draft_model(draft_vocabulary: int = 20) -> Eagle3DraftModel:
    torch.manual_seed(3)
    sizes = tiny_sizes(draft_vocabulary)
    head = Eagle3DraftModel(sizes, torch.randperm(sizes.vocabulary)[:draft_vocabulary])
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.35)
    return head.eval()


def sequential_drafts(
    head: Eagle3DraftModel, embed: Tensor, features: Tensor, tokens: Tensor, root: int, steps: int
) -> list[int]:
    """Draft as a runtime would: true rows 0..root - 1 first, then one row a step with the fed-back state."""
    w = dict(head.named_parameters())
    sizes = head.sizes

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + sizes.rms_norm_eps) * w[name]

    def rotate(x: Tensor, position: int) -> Tensor:
        half = sizes.head_dim // 2
        out = x.clone()
        for i in range(half):
            angle = position / sizes.rope_theta ** (2 * i / sizes.head_dim)
            out[:, i] = x[:, i] * math.cos(angle) - x[:, i + half] * math.sin(angle)
            out[:, i + half] = x[:, i + half] * math.cos(angle) + x[:, i] * math.sin(angle)
        return out

    keys: list[Tensor] = []
    values: list[Tensor] = []
    drafts: list[int] = []

    def row(token: int, hidden: Any, position: int) -> Any:
        both = torch.cat(
            [norm(embed[token], "midlayer.input_layernorm.weight"), norm(hidden, "midlayer.hidden_norm.weight")]
        )
        q = rotate((w["midlayer.self_attn.q_proj.weight"] @ both).view(sizes.heads, -1), position)
        keys.append(rotate((w["midlayer.self_attn.k_proj.weight"] @ both).view(sizes.kv_heads, -1), position))
        values.append((w["midlayer.self_attn.v_proj.weight"] @ both).view(sizes.kv_heads, -1))
        mixed = []
        for h in range(sizes.heads):
            g = h // (sizes.heads // sizes.kv_heads)
            scores = torch.stack([q[h] @ k[g] for k in keys]) / sizes.head_dim**0.5
            mixed.append((scores.softmax(0)[:, None] * torch.stack([v[g] for v in values])).sum(0))
        h1 = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        m = norm(h1, "midlayer.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(w["midlayer.mlp.gate_proj.weight"] @ m)
        h2 = h1 + w["midlayer.mlp.down_proj.weight"] @ (gate * (w["midlayer.mlp.up_proj.weight"] @ m))
        i = int((w["lm_head.weight"] @ norm(h2, "norm.weight")).argmax())
        return h2, i + int(head.d2t[i])

    hidden, draft = torch.zeros(0), -1
    for j in range(root):
        hidden, draft = row(int(tokens[j + 1]), w["fc.weight"] @ features[j], j)
    drafts.append(draft)
    for k in range(1, steps):
        hidden, draft = row(drafts[-1], hidden, root - 1 + k)
        drafts.append(draft)
    return drafts


def test_parallel_steps_equal_a_sequential_draft() -> None:
    head = tiny_draft_model()
    torch.manual_seed(4)
    embed = torch.randn(32, 24)
    features = torch.randn(12, 72)
    steps = 4
    checked = 0
    with torch.no_grad():
        for root in range(2, 8):
            tokens = torch.randint(0, 32, (12,))
            # make the text agree with the drafts, so that every fed-back token is the text's
            tokens[root + 1 : root + 1 + steps] = torch.tensor(
                sequential_drafts(head, embed, features, tokens, root, steps)
            )
            states = head.steps(embed[tokens[1:]][None], features[None, :-1], steps)
            parallel = [head.lm_head(state) for state in states]
            for k in range(steps):
                drafted = int(head.draft_ids[parallel[k][0, root - 1 + k].argmax()])
                assert drafted == int(tokens[root + 1 + k])
                checked += 1
    assert checked == 24


def test_cycles_of_a_text() -> None:
    # root at 3; step 0 matches at rows 2, 3; step 1 at row 3; step 2 never
    matches = [[False] * 12 for _ in range(3)]
    matches[0][2] = matches[0][3] = matches[1][3] = True
    # root 3: rows 2, 3 match, step 2 at row 4 fails: 2 accepted; root 6 and 7: 0 accepted
    assert walk_cycles(matches, 3, 10, 3) == [2, 0, 0]
    assert walk_cycles(matches, 3, 5, 3) == []


def test_head_round_trip(tmp_path: Path) -> None:
    head = tiny_draft_model()
    save_draft_model(head, tmp_path)
    again = load_draft_model(tmp_path)
    assert torch.equal(again.draft_ids, head.draft_ids)
    assert again.sizes == head.sizes
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter.bfloat16(), again.get_parameter(name).bfloat16())
    assert bool((head.draft_ids.diff() > 0).all()) and bool(head.t2d[head.draft_ids].all())
    full = tiny_draft_model(32)
    save_draft_model(full, tmp_path / "full")
    assert torch.equal(load_draft_model(tmp_path / "full").draft_ids, torch.arange(32))


def tiny_teacher(tmp_path: Path) -> Teacher:
    return Teacher.load(tiny_target(tmp_path), "cpu")


def test_features_are_the_streams_entering_layers(tmp_path: Path) -> None:
    teacher = tiny_teacher(tmp_path)
    boundaries = boundaries_of(teacher.num_layers)
    assert boundaries == (2, 3, 4)
    tokens = torch.randint(0, 257, (2, 9))
    features, last = teacher.features(tokens, boundaries)
    with torch.no_grad():
        out = teacher.model(tokens, output_hidden_states=True)
    assert torch.equal(features, torch.cat([out.hidden_states[b] for b in boundaries], dim=-1))
    assert torch.allclose(teacher.logits(last), out.logits)
    greedy = teacher.generate([[1, 2, 3], [4]], 5, temperature=0.0, stop=False)
    assert [len(tokens) for tokens in greedy] == [5, 5]
    with torch.no_grad():
        assert greedy[1][0] == int(teacher.model(torch.tensor([[4]])).logits[0, -1].argmax())


PAPERS: dict[str, tuple[type[PaperDraftModel], dict[str, Any]]] = {
    "peagle": (PaperDraftModel, {"norm_before_fc": False, "fc_norm": False, "norm_before_residual": False}),
    "dflash": (PaperDflash, {"sample_from_anchor": False}),
    "dspark": (PaperDspark, {"sample_from_anchor": True}),
}


def parallel_model(teacher: Teacher, method: str) -> ParallelDraftModel:
    """A small one, random but for the embedding."""
    sizes = DraftSizes(**{**vars(tiny_sizes(257)), "vocabulary": 257, "rope_theta": 10000.0})
    form = ParallelForm(method, layers=2, drafts=3, mask_token=9, markov_rank=8 if method == "dspark" else 0)
    head = ParallelDraftModel(sizes, form, teacher.model.get_input_embeddings().weight.detach())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return head


@pytest.mark.parametrize("method", PAPERS)
def test_blocks_of_all_anchors_are_the_papers_of_each(method: str, tmp_path: Path) -> None:
    """What is trained is what the equations draft behind each anchor alone, and what the runtime loads."""
    teacher = tiny_teacher(tmp_path / "target")
    head, tokens = parallel_model(teacher, method), torch.randint(0, 257, (2, 15))
    anchors = torch.tensor([1, 4, 5, 11])
    at = anchors[:, None] + torch.arange(3)
    with torch.no_grad():
        features, _ = teacher.features(tokens, head.sizes.boundaries)
        states = head.states(tokens, features[:, :-1], anchors)
        found = head.logits(states, tokens[:, at])
    save_parallel_model(head, tmp_path / "head", 7)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    make, own = PAPERS[method]
    config |= {"norm_output": False, "heads": {**config, "markov_head_type": "vanilla"}, **own}
    weights = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    paper = make(config, weights, teacher.model)
    for row, place in ((0, 0), (1, 1), (0, 2), (1, 3)):
        anchor = int(anchors[place])
        known = tokens[row, : anchor + 1].tolist()
        captured = features[row, :anchor].chunk(3, dim=-1)
        drafted = tokens[row, anchor + 1 : anchor + 3].tolist()
        expected = paper.draft_logits(known, paper.features(captured), drafted)
        torch.testing.assert_close(found[row, place], expected, atol=2e-4, rtol=1e-4)
    options = SpeculativeConfig(method=draft_method(tmp_path / "head"), model=tmp_path / "head")
    loaded = load_speculator(options, read_model_config(tmp_path / "target"))
    assert loaded.speculator.method == method
    assert loaded.speculator.draft_config is not None
    assert loaded.speculator.draft_config.capture_boundaries == head.sizes.boundaries


@pytest.mark.parametrize("method", staged(PAPERS, first=["dspark"]))
def test_a_parallel_draft_model_starts_from_its_target_and_learns(method: str, tmp_path: Path) -> None:
    teacher = tiny_teacher(tmp_path)
    head = parallel_model(teacher, method)
    head.start_from(teacher, Eagle3DraftModel(head.sizes))
    tokens = torch.arange(64).repeat(4, 1) % 16
    keep, optimizer = torch.ones_like(tokens, dtype=torch.bool), torch.optim.Adam(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss, right = parallel_loss(teacher, head, tokens, keep, anchors=12, decay=0.8, sharpness=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1 and right.shape == (3,)
    assert torch.equal(head.embed_tokens.weight, teacher.model.get_input_embeddings().weight)


def test_boundaries_are_three_different_streams() -> None:
    for num_layers in range(7, 40):
        assert len(set(boundaries_of(num_layers))) == 3
    for num_layers in (1, 5, 6):
        with pytest.raises(ConfigError, match=f"has {num_layers} layers"):
            boundaries_of(num_layers)


def test_matches_have_a_row_a_position(tmp_path: Path) -> None:
    teacher = tiny_teacher(tmp_path)
    sizes = DraftSizes(**{**vars(tiny_sizes(257)), "vocabulary": 257})
    head = Eagle3DraftModel(sizes).eval()
    matches = draft_matches(teacher, head, [[1, 2, 3, 4, 5], [6, 7, 8]], 2)
    assert matches.shape == (2, 2, 4) and not bool(matches[:, :, -1].any())


def test_split_packing_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    documents = [f"document {i}\nwith two lines" for i in range(300)]
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    assert read_documents(path) == documents
    training, held_out = split(documents)
    assert len(training) + len(held_out) == 300 and 0 < len(held_out) < 30
    assert all(is_held_out(document) for document in held_out)

    def words(texts: list[str], add_special_tokens: bool) -> Any:
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    tokens = tokenize(words, documents, separator=0)
    assert (tokens == 0).sum() == 300 and len(tokens) == 300 * 6
    rows = pack(tokens, 100, np.random.default_rng(0))
    assert rows.shape[1] == 100 and rows.shape[0] in (17, 18)
    with pytest.raises(ValueError, match="need at least"):
        pack(tokens[:150], 100, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("document", "domain"),
    [
        ("Acts chapter 6\n\nNow in those days", "scripture"),
        ("dog (noun): an animal\ncat (noun): another", "definitions"),
        ("import os\n\ndef f():\n    return 1\n\nclass A:\n    def g(self):\n        pass\n", "code"),
        ("GetRequest\n- Name: The name.\n- Arn: The arn.\n- Key: The key.\n- Tag: A tag.\n", "api"),
    ],
)
def test_domains(document: str, domain: str) -> None:
    assert domain_of(document) == domain


def test_loops_and_schedule() -> None:
    assert loops([1, 2, 3, 4] * 12) and not loops(list(range(48)))
    assert learning_rate_scale(0.0) > 0 and learning_rate_scale(0.2) == 1.0 and learning_rate_scale(1.0) == 0.0


@pytest.mark.parametrize("ends", [(), (5, 9)])
def test_batched_decoding_writes_what_single_forwards_do(tmp_path: Path, ends: tuple[int, ...]) -> None:
    from lowlat.tools.train.decode import can_decode, decode

    teacher = tiny_teacher(tmp_path)
    assert can_decode(teacher.model)
    with torch.no_grad():
        for parameter in teacher.model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    written = decode(teacher.model, prompts, 18, temperature=0.0, ends=ends)
    for prompt, new in zip(prompts, written, strict=True):
        text = list(prompt)
        while len(text) - len(prompt) < 18 and (len(text) == len(prompt) or text[-1] not in ends):
            with torch.no_grad():
                text.append(int(teacher.model(torch.tensor([text])).logits[0, -1].argmax()))
        assert new == text[len(prompt) :]
    torch.manual_seed(1)
    drawn = decode(teacher.model, [[1, 2]] * 4000, 1, temperature=0.7, ends=())
    with torch.no_grad():
        expected = (teacher.model(torch.tensor([[1, 2]])).logits[0, -1] / 0.7).softmax(-1)
    share = np.bincount([tokens[0] for tokens in drawn], minlength=257) / 4000
    assert np.abs(share - expected.numpy()).max() < 0.04


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_other_families_decode_alike(family: str, tmp_path: Path) -> None:
    from lowlat.tools.train.decode import can_decode, decode

    model = make_target(tmp_path, family, seed=1)
    assert can_decode(model)
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    for prompt, new in zip(prompts, decode(model, prompts, 12, temperature=0.0, ends=()), strict=True):
        chosen = transformers_logits(model, prompt + new)[len(prompt) - 1 : -1].argmax(-1)
        assert new == chosen.tolist()
    windowed = make_target(tmp_path / "windowed", "mistral", sliding_window=4)
    assert not can_decode(windowed) and not can_decode(make_target(tmp_path / "other", "qwen3"))


def test_rows_keep_what_the_target_wrote(tmp_path: Path) -> None:
    from lowlat.tools.train.rows import WritingPlan, load_rows, mix_batches, save_rows, write_rows

    teacher = tiny_teacher(tmp_path)
    text = np.arange(4000, dtype=np.int32) % 250
    plan = WritingPlan(length=32, max_rows=10, minutes=1.0, batch=5, answer_tokens=8, temperature=0.7)
    tokens, keep = write_rows(teacher, plan, text, [])
    assert tokens.shape == (10, 33) and bool(keep[:, -1].all()) and not bool(keep[:, :16].any())
    tokens, keep = write_rows(teacher, plan, text, [[1, 2, 3], [4, 5]])
    assert int(keep.sum(1).max()) <= 8 and bool((tokens[:, 12:] == 0).all())
    save_rows((tokens, keep), tmp_path / "rows.pt")
    again = load_rows(tmp_path / "rows.pt")
    assert torch.equal(again[0], tokens) and torch.equal(again[1], keep)
    batches = mix_batches(text, again, batch=4, length=32, text_lengths=(64, 128), own_share=0.5)
    widths = {next(batches)[0].shape for _ in range(20)}
    assert {(2, 65), (1, 129)} < widths and any(shape[1] == 33 for shape in widths)


def test_questions_come_from_the_text() -> None:
    from lowlat.tools.train.questions import make_questions

    documents = ["dog (noun): an animal that barks\nrun (verb): move fast on foot"] * 3
    questions = make_questions(documents, 30)
    assert len(questions) == len(set(questions)) == 30
    assert any("dog" in question for question in questions)


def test_a_thinned_log_keeps_its_mean() -> None:
    from lowlat.tools.train.plot import thin

    log = [{"step": 10 * (i + 1), "tokens": i, "loss": float(i)} for i in range(7)] + [
        {"step": 71, "tokens": 9, "loss": 99.0}
    ]
    short = thin(log, 3)
    assert [entry["step"] for entry in short] == [30, 71] and short[0]["loss"] == 1.0
    assert short[1]["loss"] == pytest.approx((10 * (3 + 4 + 5 + 6) + 99) / 41, abs=1e-4)
