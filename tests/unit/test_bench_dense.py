"""The dense benchmark's bytes, its torch baseline against transformers and the paper's head, its run and its report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench
from paper_draft_model import PaperDraftModel
from tiny_models import make_target, random_draft_model, residual_streams, transformers_logits
from transformers import DynamicCache

from lowlat.errors import ShapeError

GIGA = 1e9

cases, clock, steps, ways = (bench(name) for name in ("dense_cases", "clock", "torch_step", "torch_attention"))


@pytest.mark.parametrize(("batch", "context", "gigabytes"), [(1, 8192, 16.08), (1, 32768, 19.30), (4, 16384, 23.60)])
def test_bytes_of_a_baseline_step(batch: int, context: int, gigabytes: float) -> None:
    moved = cases.step_bytes(cases.LLAMA_8B, cases.Case(batch, context, 0)) / GIGA
    assert moved == pytest.approx(gigabytes, abs=0.005)


def test_bytes_of_the_head() -> None:
    def moved(depth: int) -> float:
        return float(cases.step_bytes(cases.LLAMA_8B, cases.Case(1, 8192, depth)) / GIGA)

    cache = 8192 * 2 * 1024 * 2 / GIGA
    assert moved(5) - moved(4) - cache == pytest.approx(0.749, abs=0.0005)
    assert moved(1) - moved(0) - 0.749 - cache == pytest.approx(0.101, abs=0.001)


def test_bytes_are_those_of_the_weights() -> None:
    geometry = cases.TINY
    weights = cases.make_weights(geometry, torch.device("cpu"))
    matrices = {name: tensor.numel() for name, tensor in weights.items() if tensor.dim() == 2}
    head = sum(count for name, count in matrices.items() if name.startswith("head.") and name != "head.fc.weight")
    target = sum(count for name, count in matrices.items() if not name.startswith(("head.", "embed.")))
    cache = 24 * 2 * geometry.kv_size * 2
    expected = target + geometry.num_layers * cache + matrices["head.fc.weight"] + 3 * (head + cache)
    assert cases.step_bytes(geometry, cases.Case(2, 24, 3)) == 2 * expected


def test_cases_are_named_and_say_what_is_simulated() -> None:
    assert [case.name for case in cases.CASES] == [
        *("1 x 8K, S=0", "1 x 32K, S=0", "4 x 16K, S=0", "1 x 8K, S=3", "1 x 32K, S=3", "4 x 16K, S=3")
    ]
    assert len({case.name for case in cases.ALL_CASES}) == len(cases.ALL_CASES)
    assert cases.Case(1, 8192, 0).accept_length is None
    assert cases.Case(1, 8192, 3).accept_length == 3.0
    assert all(1 < case.accept_length <= case.rows for case in cases.ALL_CASES if case.num_speculative_tokens)


ON_CPU = [name for name in ways.WAYS if name not in ("flex", "cudnn", "cudnn folded", "efficient folded")]
ON_CPU = [name for name in ON_CPU if not name.endswith("compiled")]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("length", [5, 256, 257])
def test_every_way_of_attention_is_the_definition(name: str, rows: int, length: int) -> None:
    shape = ways.AttentionShape(2, 6, 2, 16, rows, length, 512)
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, rows, 6, 16, generator=generator).transpose(1, 2)
    k, v = (torch.randn(2, 2, 512, 16, generator=generator) for _ in "kv")
    expected = torch.empty(2 * rows, 96)
    for slot in range(2):
        for row in range(rows):
            for head in range(6):
                seen = length - rows + row + 1
                weights = torch.softmax(k[slot, head // 3, :seen] @ q[slot, head, row] / 4, -1)
                expected[slot * rows + row, 16 * head : 16 * head + 16] = weights @ v[slot, head // 3, :seen]
    device = torch.device("cpu")
    torch.testing.assert_close(ways.naive(shape, q, k, v), expected)
    torch.testing.assert_close(ways.WAYS[name](shape, device, torch.float32)(q, k, v), expected, atol=1e-5, rtol=1e-4)


def test_choice_takes_what_works_and_reports_the_rest() -> None:
    shape = ways.AttentionShape(1, 4, 2, 16, 2, 20, 256)
    caches = [(torch.randn(1, 2, 256, 16), torch.randn(1, 2, 256, 16)) for _ in range(2)]
    choice = ways.choose(shape, caches, ["flash folded", "flex", "split products 256"], replays=3)
    assert choice.name in ("flash folded", "split products 256")
    assert set(choice.microseconds) == {"flash folded", "flex", "split products 256"}
    assert "NotImplementedError" in choice.microseconds["flex"]
    with pytest.raises(RuntimeError, match="no attention works"):
        ways.choose(shape, caches, ["flex"])


def test_choice_refuses_a_way_that_sees_a_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ways.AttentionShape(1, 4, 2, 16, 2, 500, 512)
    caches = [(torch.randn(1, 2, 512, 16), torch.randn(1, 2, 512, 16))]

    def unmasked(shape: Any, *_: Any) -> Any:
        return lambda q, k, v: shape.join(ways._flash(shape.fold(q), k[:, :, :500], v[:, :, :500])[0])

    monkeypatch.setitem(ways.WAYS, "unmasked", unmasked)
    choice = ways.choose(shape, caches, ["unmasked", "flash"], replays=3)
    assert choice.name == "flash"
    assert "off by" in choice.microseconds["unmasked"]


class Pair:
    """A small target of transformers' with a head, as a TorchStep's geometry and weights."""

    def __init__(self, directory: Path) -> None:
        self.model = make_target(directory / "target", "llama", gain=0.5)
        self.config, self.head = random_draft_model(
            directory / "head", self.model, captures=(0, 2, 3), draft_vocab_size=60
        )
        config = self.model.config
        self.paper = PaperDraftModel(self.config, self.head, self.model)
        self.geometry = cases.DenseGeometry(
            *("pair", 32, 3, 4, 2, 8, 48, config.vocab_size, 60, (0, 2, 3)),
            rope_theta=10000.0,
            rms_norm_eps=config.rms_norm_eps,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        model = self.model.model
        found = {"embed.weight": model.embed_tokens.weight, "norm.weight": model.norm.weight}
        found["lm_head.weight"] = self.model.lm_head.weight
        for index, layer in enumerate(model.layers):
            parts = {
                "attn_norm": [layer.input_layernorm],
                "qkv": [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
                "o": [layer.self_attn.o_proj],
                "ffn_norm": [layer.post_attention_layernorm],
                "gate_up": [layer.mlp.gate_proj, layer.mlp.up_proj],
                "down": [layer.mlp.down_proj],
            }
            for part, modules in parts.items():
                found[f"layers.{index}.{part}.weight"] = torch.cat([module.weight for module in modules])
        return {**found, **self._head_weights()}

    def _head_weights(self) -> dict[str, torch.Tensor]:
        layer, head = "layers.0.", self.head
        parts = {
            "embed_norm": ["input_layernorm"],
            "hidden_norm": ["hidden_norm"],
            "ffn_norm": ["post_attention_layernorm"],
            "q": ["self_attn.q_proj"],
            "kv": ["self_attn.k_proj", "self_attn.v_proj"],
            "o": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        }
        found = {
            f"head.{part}.weight": torch.cat([head[f"{layer}{name}.weight"] for name in names])
            for part, names in parts.items()
        }
        found |= {f"head.{name}.weight": head[f"{name}.weight"] for name in ("fc", "norm", "lm_head")}
        return {**found, "head.draft_to_target": (head["d2t"] + torch.arange(60)).to(torch.int32)}

    def fill(self, step: Any, slot: int, tokens: list[int], context: int) -> None:
        """Keys and values of the target's tokens [0, context), and of the head's rows of the same numbers."""
        past = DynamicCache(config=self.model.config)
        self.model(torch.tensor([tokens[:context]]), past_key_values=past, use_cache=True)
        for (k, v), layer in zip(step.caches, past.layers, strict=False):
            k[slot, :, :context], v[slot, :, :context] = layer.keys[0], layer.values[0]
        paper = self.paper
        features = paper.features([residual_streams(self.model, tokens)[b] for b in (0, 2, 3)])[:context]
        embedded = paper.embedding[torch.tensor(tokens[1 : context + 1])]
        both = (paper._norm(embedded, "layers.0.input_layernorm"), paper._norm(features, "layers.0.hidden_norm"))
        for cache, part in zip(step.caches[-1], ("k_proj", "v_proj"), strict=True):
            rows = paper._linear(torch.cat(both, -1), 0, f"self_attn.{part}").view(context, 2, 8)
            cache[slot, :, :context] = (paper._rotate(rows) if part == "k_proj" else rows).transpose(0, 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("attention", ["flash", "flash folded", "split products 256"])
@pytest.mark.parametrize("glue", ["eager", "functional"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_torch_step_is_transformers_and_the_papers_head(pair: Pair, attention: str, glue: str, depth: int) -> None:
    context, batch = 19, 2
    step = steps.TorchStep(
        pair.geometry, cases.Case(batch, context, depth), pair.weights(), torch.device("cpu"), attention=[attention]
    )
    step._layers.compiled = glue == "functional"  # the operations that torch.compile is given, without compiling
    generator = torch.Generator().manual_seed(depth)
    texts = torch.randint(97, (batch, context + depth + 1), generator=generator).tolist()
    for slot, text in enumerate(texts):
        pair.fill(step, slot, text, context)
        step.tokens[slot] = torch.tensor(text[context:])
    step.replay()
    for slot, text in enumerate(texts):
        rows = slice(slot * (depth + 1), (slot + 1) * (depth + 1))
        logits = transformers_logits(pair.model, text)[context:]
        torch.testing.assert_close(step.logits[rows], logits, atol=2e-4, rtol=2e-4)
        chosen = logits.argmax(-1).tolist()
        if depth:
            # every row counts as accepted: a row of the head holds a position's feature and what the target chose there
            features = pair.paper.features([residual_streams(pair.model, text)[b] for b in (0, 2, 3)])
            drafts = step.tokens[slot, 1:].tolist()
            rows_of_head = [*text[: context + 1], *chosen]
            expected = pair.paper.draft_logits(rows_of_head, features, drafts)[:depth]
            for level in range(depth):
                torch.testing.assert_close(step.draft_logits[level][slot], expected[level], atol=2e-4, rtol=2e-4)
        assert int(step.tokens[slot, 0]) == chosen[-1]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dense") / "results" / "dense.json"
    assert bench("dense").main(["--out", str(out), "--dry-run", "--commit", "abc1234"]) == 0
    return out


FIELDS = {
    **dict.fromkeys(("case", "commit", "card", "driver", "torch", "cuda", "torch_attention", "executor"), str),
    **dict.fromkeys(("batch", "context", "num_speculative_tokens", "bytes", "launches", "replays"), int),
    **dict.fromkeys(("ms_p50", "ms_p99", "host_ms_p50", "wall_gb_per_s", "floor_ms", "over_floor"), float),
    **dict.fromkeys(("torch_graph_ms_p50", "torch_graph_ms_p99", "tokens_per_s", "device_loop_ms_p50"), float),
    "torch_attention_us": dict,
    "tokens_per_s_is_simulated": bool,
}


def test_dry_run_writes_every_field_of_every_case(dry_run: Path) -> None:
    result = cases.read_results(dry_run)
    assert [row["case"] for row in result["rows"]] == [case.name for case in cases.TINY_CASES]
    for row, case in zip(result["rows"], cases.TINY_CASES, strict=True):
        assert {name: type(row.get(name)) for name in FIELDS} == FIELDS
        assert row["commit"] == "abc1234"
        assert row["bytes"] == cases.step_bytes(cases.TINY, case)
        assert row["floor_ms"] == pytest.approx(row["bytes"] / row["wall_gb_per_s"] / 1e6, abs=5e-5)
        length = row["simulated_accept_length"]
        assert (length is None) == (not row["tokens_per_s_is_simulated"]) == (case.num_speculative_tokens == 0)
        expected = 1e3 * case.batch * (length or 1) / row["ms_p50"]
        assert row["tokens_per_s"] == pytest.approx(expected, rel=0.01)
    assert len(result["conditions"]["walls"]) == 2


@pytest.mark.second
def test_the_higher_wall_counts_and_a_failing_case_is_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, walls = bench("dense"), iter((100.0, 125.0))
    monkeypatch.setattr(dense, "_wall", lambda *_: dense.Wall(next(walls), 0, 0, {}))

    class Failing(dense.StandIn):  # type: ignore[misc, name-defined]
        def __init__(self, geometry: Any, case: Any, *rest: Any) -> None:
            if case.batch == 1:
                raise ValueError("no such bucket")
            super().__init__(geometry, case, *rest)

    monkeypatch.setattr(dense, "StandIn", Failing)
    out = tmp_path / "dense.json"
    assert dense.main(["--out", str(out), "--dry-run"]) == 1
    failed, measured = json.loads(out.read_text())
    assert failed["error"] == "ValueError: no such bucket"
    assert measured["wall_gb_per_s"] == 125.0
    bench("dense_report").main([str(out), "--no-plot"])
    assert "1 x 40" not in (tmp_path / "dense.md").read_text()


@pytest.mark.second
def test_torch_alone_and_ours_alone(tmp_path: Path) -> None:
    dense, out = bench("dense"), tmp_path / "dense.json"
    assert dense.main(["--out", str(out), "--dry-run", "--skip-torch", "--case", "1x24x1"]) == 0
    (row,) = json.loads(out.read_text())
    assert row["case"] == "1 x 24, S=1"
    assert row["ms_p50"] > 0
    assert row["torch_graph_ms_p50"] is None
    assert row["speed_up_over_torch_graph"] is None
    bench("dense_report").main([str(out), "--no-plot"])


def sample_result() -> dict[str, Any]:
    """Rows as a run would write them, with made-up times."""
    dense, rows = bench("dense"), []
    for case in cases.CASES:
        floor = cases.step_bytes(cases.LLAMA_8B, case) / 4.5e9
        row = dense._described(cases.LLAMA_8B, case)
        row |= {"ms_p50": 1.1 * floor, "ms_p99": 1.15 * floor, "torch_graph_ms_p50": 1.5 * floor}
        row |= {"card": "a card", "driver": "1", "cuda": "13", "torch": "2", "commit": "abc", "replays": 300}
        rows.append(dense._beside_wall(row, 4500.0))
    model = {"name": "Llama-3.1-8B", "weights": "random, bfloat16"}
    return {"conditions": {"model": model, "dry_run": False}, "rows": rows}


def test_table_and_caption_say_what_was_measured() -> None:
    report, result = bench("dense_report"), sample_result()
    lines = report.table(result["rows"]).splitlines()
    assert len(lines) == 2 + len(cases.CASES)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| 1 x 8K, S=0 | 16.08 | 3.57 | 3.93 / 4.11 | 1.10 x | 5.36 | 1.36 x | 254 | - |"
    assert "(sim.)" in lines[5]
    assert "(sim.)" not in lines[4]
    spoken = report.caption(result)
    assert "3.00 at S = 3" in spoken
    assert "4500 GB/s" in spoken
    assert "dry run" not in spoken


def test_picture_is_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        bench("dense_report").draw(sample_result(), [path, path.with_suffix(".png")])
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".png").stat().st_size > 10_000


def test_percentiles_and_turns() -> None:
    assert clock.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert clock.percentile([float(k) for k in range(300)], 99) == 296.0
    assert clock.percentile([5.0], 99) == 5.0
    with pytest.raises(ValueError, match="no values"):
        clock.percentile([], 50)
    order: list[str] = []
    entries = [
        clock.Timed(name, lambda name=name: order.append(name), lambda name=name: order.append(name.upper()))
        for name in "ab"
    ]
    clock.round_robin(entries, 5, 3, torch.device("cpu"))
    assert "".join(order) == "AaaaaaBbbbbbAaaaaBbbbb"  # a reset, two replays untimed, then at most three timed
    assert [len(entry.ms) for entry in entries] == [5, 5]


def test_exclusive_or_of_words() -> None:
    for count in (1, 2, 3, 7, 64, 1001):
        words = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
        expected = 0
        for word in words.tolist():
            expected ^= word
        assert bench("wall").exclusive_or(words.clone()) == expected


def test_rows_of_single_kernels() -> None:
    micro = bench("micro")
    entry = micro.Entry("copy", lambda copy: [], copies=10, moved_bytes=4_000_000)
    row = micro.describe(entry, [0.02, 0.01, 0.03], wall_gb_per_s=4000.0)
    assert row["us_p50"] == 2.0
    assert row["us_p99"] == 3.0
    assert row["gb_per_s"] == 2000.0
    assert row["share_of_wall"] == 0.5
    assert "gb_per_s" not in micro.describe(micro.Entry("small", lambda copy: []), [0.02], 4000.0)


def test_a_kernel_that_does_not_compile_is_told_by_name() -> None:
    micro = bench("micro")

    def fail(copy: int) -> Any:
        raise ShapeError(f"no copy {copy}")

    class NoLauncher:
        device = torch.device("cpu")

    (row,) = micro.time_entries(NoLauncher(), [micro.Entry("broken", fail)])
    assert row == {"name": "broken", "error": "ShapeError: no copy 0"}
