"""Other engines next to lowlat: tokens as samples, what each is asked for by its documentation, and a whole comparison.

vLLM, SGLang, TensorRT-LLM and llama.cpp are not installed where tests run: fakes stand in for them that take what their
documents name and answer as these say. Their figures mean nothing; which arguments go out and how answers are read,
does.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from benches import bench

from lowlat.errors import ConfigError, LowlatError
from lowlat.tools.bench.geometry import random_target, read_geometries
from lowlat.tools.bench.results import Memory, Spread
from lowlat.tools.bench.scenarios import Case

peers = bench("peers.engines").ENGINES
engine, run = bench("peers.engine"), bench("peers.run")


def make_job(name: str, depth: int = 0, batch: int = 1, **others: Any) -> Any:
    values: dict[str, Any] = {
        "engine": name, "case": Case(16, batch, depth), "steps": 4, "warm_up": 2, "repeats": 2, "device": "cpu",
        "dtype": "bfloat16", "vocab_size": 160, "directory": "target", "geometry": "tiny", "draft_directory": "draft",
    }  # fmt: skip
    return engine.Job(**{**values, **others})


def test_arrivals_become_steps() -> None:
    """Two requests, of which one begins three steps earlier; the step of the last first token is not counted."""
    arrivals = engine.Arrivals(make_job("vllm", 3, 2), ["a", "b"])
    begin = arrivals._begin
    now, a = begin, 0
    for _ in range(3):
        now, a = now + 0.5, a + 1
        arrivals.take([("a", a)], now)
    now, a, b = now + 0.5, a + 2, 1
    arrivals.take([("a", a), ("b", b)], now)
    for step in range(8):
        now, a, b = now + 0.001 * (step + 1), a + 3, b + 1
        arrivals.take([("b", b)], now - 0.0001)  # streams of their own, one after the other
        arrivals.take([("a", a)], now)
    samples = arrivals.samples
    assert arrivals.complete and [round(ms) for ms in samples.first_ms] == [500, 2000]
    assert [round(ms, 3) for ms in samples.step_ms] == [3.0, 4.0, 5.0, 6.0]  # two warm up, two are beyond the count
    assert samples.tokens == [4] * 4 and samples.active == [2] * 4
    assert samples.lengths[0] == 16 + (5 + 6 + 1 + 2) / 2


def fake_vllm(given: dict[str, Any]) -> ModuleType:
    """A module whose LLM brings each request `1 + S` tokens a step, or what acceptance is imposed."""

    class Engine:
        def __init__(self) -> None:
            self.tokens: dict[str, list[int]] = {}

        def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
            given.setdefault("prompts", []).append(prompt["prompt_token_ids"])
            self.tokens[request_id] = []

        def step(self) -> list[Any]:
            length = int(given["llm"].get("speculative_config", {}).get("synthetic_acceptance_length", 1))
            for tokens in self.tokens.values():
                tokens += [1] * length
            found = self.tokens.items()
            return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=own)]) for name, own in found]

        def has_unfinished_requests(self) -> bool:
            return bool(self.tokens)

        def abort_request(self, names: list[str]) -> None:
            for name in names:
                del self.tokens[name]

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            given["llm"] = arguments
            self.llm_engine = Engine()

    module = ModuleType("vllm")
    module.LLM = LLM  # type: ignore[attr-defined]
    module.SamplingParams = lambda **values: given.setdefault("params", values)  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(("depth", "batch"), [(0, 1), (3, 2)])
def test_vllm_is_asked_as_documented(monkeypatch: pytest.MonkeyPatch, depth: int, batch: int) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm(given))
    job = make_job("vllm", depth, batch, device="cuda", accept_length=3.0)
    marked: list[bool] = []
    measured = peers["vllm"].measure(job, lambda: marked.append(True))
    row = bench("peers.worker").row_of(job, "1.0", measured, 5)
    llm = given["llm"]
    assert llm["load_format"] == "dummy" and llm["skip_tokenizer_init"] and not llm["enable_prefix_caching"]
    assert llm["max_num_seqs"] == batch and llm["max_model_len"] == 16 + job.room
    drafts = {
        "method": "eagle3",
        "model": "draft",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.0,
    }
    assert llm.get("speculative_config") == (drafts if depth else None)
    assert given["params"]["ignore_eos"] and given["params"]["temperature"] == 0.0
    assert given["prompts"] == 2 * engine.prompts_of(job) and marked == [True]
    assert row.num_steps == 8 and row.accept_length == (3.0 if depth else None)
    assert row.ms_per_step.count == 8 and row.memory.device_bytes == 5


@pytest.mark.parametrize(("depth", "batch"), [(0, 2), (3, 1)])
def test_sglang_is_asked_as_documented(monkeypatch: pytest.MonkeyPatch, depth: int, batch: int) -> None:
    given: dict[str, Any] = {}

    class Engine:
        def __init__(self, **arguments: Any) -> None:
            given["engine"] = arguments

        def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any], stream: bool) -> Any:
            assert stream and sampling_params["ignore_eos"]
            given["prompts"] = input_ids
            for total in range(1, 1 + sampling_params["max_new_tokens"]):
                for index in range(len(input_ids)):
                    yield {"index": index, "meta_info": {"completion_tokens": total}}

        def shutdown(self) -> None:
            given["ended"] = True

    module = ModuleType("sglang")
    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", module)
    for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"):
        monkeypatch.setenv(name, "")  # put back at the end
    job = make_job("sglang", depth, batch, device="cuda", accept_length=2.5)
    measured = peers["sglang"].measure(job, lambda: None)
    asked = given["engine"]
    assert asked["load_format"] == "dummy" and asked["disable_radix_cache"] and asked["max_running_requests"] == batch
    assert asked.get("speculative_algorithm") == ("EAGLE3" if depth else None)
    chain = (3, 1, 4) if depth else (None, None, None)
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    assert tuple(asked.get(name) for name in names) == chain
    assert measured.settings.get("SGLANG_SIMULATE_ACC_LEN") == ("2.5" if depth else None)
    assert given["prompts"] == engine.prompts_of(job) and given["ended"]
    assert [len(samples.step_ms) for samples in measured.repeats] == [4, 4]


@pytest.mark.parametrize(("depth", "batch"), [(0, 2), (3, 1)])
def test_tensorrt_llm_is_asked_as_documented(monkeypatch: pytest.MonkeyPatch, depth: int, batch: int) -> None:
    given: dict[str, Any] = {"prompts": [], "aborted": 0}

    class Request:
        def __init__(self, params: dict[str, Any]) -> None:
            self.params = params

        async def __aiter__(self) -> Any:
            for total in range(1, 1 + self.params["max_tokens"]):
                await asyncio.sleep(0)  # as all streams do
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * total)])

        def abort(self) -> None:
            given["aborted"] += 1

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            given["llm"] = arguments

        def generate_async(self, prompt: list[int], *, sampling_params: dict[str, Any], streaming: bool) -> Request:
            assert streaming and sampling_params["ignore_eos"]
            given["prompts"].append(prompt)
            return Request(sampling_params)

        def shutdown(self) -> None:
            given["ended"] = True

    module, configs = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    module.LLM, module.SamplingParams = LLM, dict  # type: ignore[attr-defined]
    for name in ("CudaGraphConfig", "Eagle3DecodingConfig", "KvCacheConfig"):
        setattr(configs, name, lambda _kind=name, **values: (_kind, values))
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", configs)
    forced = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    monkeypatch.setenv(forced, "")  # put back at the end
    job = make_job("tensorrt-llm", depth, batch, device="cuda", accept_length=2.5)
    measured = peers["tensorrt-llm"].measure(job, lambda: None)
    asked = given["llm"]
    assert asked["load_format"] == "dummy" and asked["backend"] == "pytorch" and asked["max_batch_size"] == batch
    assert asked["kv_cache_config"] == ("KvCacheConfig", {"enable_block_reuse": False})
    drafts = {"max_draft_len": 3, "speculative_model": "draft", "eagle3_one_model": True}
    assert asked.get("speculative_config") == (("Eagle3DecodingConfig", drafts) if depth else None)
    assert measured.settings.get(forced) == ("1.5" if depth else None)  # drafts alone, without the bonus token
    assert given["prompts"] == 2 * engine.prompts_of(job) and given["ended"] and given["aborted"] == 2 * batch
    assert [len(samples.step_ms) for samples in measured.repeats] == [4, 4]


PROGRAM = """#!/bin/sh
echo "$0 $@" >> "$(dirname "$0")/calls"
case "$*" in
  *-npl*) echo loading; for tg in 0.04 0.05 9; do echo '{"tg": 4, "pl": 2, "t_pp": 0.5, "t_tg": '$tg'}'; done ;;
  *"-n 0"*) echo '[{"n_prompt": 16, "n_gen": 0, "build_commit": "abc1234", "samples_ns": [300000000, 310000000]}]' ;;
  *-d*) echo '[{"n_prompt": 0, "n_gen": 4, "n_depth": 16, "samples_ns": [40000000, 44000000]}]' ;;
  *) echo 'version: 7000 (abc1234)' ;;
esac
"""


def test_llama_cpp_is_asked_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama-bench", "llama-batched-bench", "llama-cli"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    assert "llama-bench" in peers["llama.cpp"].available().reason
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert peers["llama.cpp"].available().version == "7000 (abc1234)"
    one, two = make_job("llama.cpp", gguf="t.gguf"), make_job("llama.cpp", batch=2, gguf="t.gguf")
    found = peers["llama.cpp"].measure(one, lambda: None)
    assert [samples.step_ms for samples in found.repeats] == [[10.0], [11.0]]
    assert [samples.first_ms for samples in found.repeats] == [[300.0], [310.0]]
    assert found.settings["build"] == "abc1234"
    row = bench("peers.worker").row_of(two, "1", peers["llama.cpp"].measure(two, lambda: None), None)
    assert (
        row.ms_per_step.p50 == 11.25
        and row.tokens_per_s == pytest.approx(2e3 / 11.25, abs=0.01)
        and row.first_token_ms.p50 == 500.0
    )
    assert (row.num_steps, row.steps_a_sample) == (8, 4)
    calls = [line.split("/")[-1] for line in (tmp_path / "calls").read_text().splitlines()]
    threads = f"-t {max(1, len(os.sched_getaffinity(0)) - 1)}"
    shared = f"-r 2 -ngl 0 {threads} -fa 1 -o json"
    assert calls[1:3] == [
        f"llama-bench -m t.gguf -p 16 -n 0 {shared}",
        f"llama-bench -m t.gguf -p 0 -n 4 -d 16 {shared}",
    ]
    several = f"-m t.gguf -c 40 -npp 16 -ntg 4 -npl 2,2,2 -ngl 0 {threads} -fa on --output-format jsonl"
    assert calls[3:] == [f"llama-batched-bench {several}"]
    with pytest.raises(LowlatError, match="no JSON"):
        peers["llama.cpp"].read_one(one, "no such model", "")
    with pytest.raises(LowlatError, match="printed 1 rows, 2 are needed"):
        peers["llama.cpp"].read_several(two, '{"t_pp": 1, "t_tg": 1}')


def test_a_gguf_holds_the_targets_weights(tmp_path: Path) -> None:
    known = read_geometries()
    target = random_target(known["tiny"], tmp_path)
    reader = gguf.GGUFReader(bench("peers.gguf_file").write_gguf(target, tmp_path / "t.gguf"))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == 3 + 4 * 9
    query = found["blk.2.attn_q.weight"]
    assert query.tensor_type == gguf.GGMLQuantizationType.BF16 and list(query.shape) == [64, 64]
    expected = target.weights["layers.2.qkv.weight"][:64].contiguous()
    assert torch.equal(torch.from_numpy(query.data.copy()).view(torch.bfloat16), expected)
    assert found["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert reader.get_field("llama.attention.head_count_kv").contents() == 2
    with pytest.raises(ConfigError, match="gpt_oss"):
        bench("peers.gguf_file").write_gguf(random_target(known["tiny-experts"], tmp_path / "e"), tmp_path / "e.gguf")


def test_transformers_generates_the_steps_asked_for(tmp_path: Path) -> None:
    random_target(read_geometries()["tiny"], tmp_path)
    measured = peers["transformers"].measure(make_job("transformers", batch=2, directory=str(tmp_path)), lambda: None)
    assert [len(samples.step_ms) for samples in measured.repeats] == [4, 4]
    assert all(samples.tokens == [2] * 4 and len(samples.first_ms) == 2 for samples in measured.repeats)
    assert measured.settings["cache"] == "dynamic"


def test_what_cannot_be_measured_has_a_reason() -> None:
    reasons = {name: peer.refusal(make_job(name, 3, draft_directory=None)) for name, peer in peers.items()}
    assert reasons["lowlat"] == "no draft model" and "EAGLE3" in reasons["transformers"]
    assert "GPU" in reasons["vllm"] and "GPU" in reasons["sglang"] and "speculation" in reasons["llama.cpp"]
    assert "GPU" in reasons["tensorrt-llm"]
    assert "MXFP4" in peers["transformers"].refusal(make_job("transformers", geometry="tiny-experts"))
    assert "GGUF" in peers["llama.cpp"].refusal(make_job("llama.cpp"))
    assert not peers["lowlat"].refusal(make_job("lowlat"))


@pytest.mark.wide
def test_a_comparison_is_written_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "peers.json"
    sizes = ["--context", 24, "-S", "0,2", "--steps", 5, "--warm-up", 1, "--repeats", 2, "--accept-length", 2]
    engines = "lowlat,transformers,sglang"
    given = ["--geometry", "tiny", "--engines", engines, *sizes, "--pairs", 2, "--device", "cpu", "--out", out]
    assert run.main([str(part) for part in given]) == 0
    result = bench("peers.results").read_peers(out)
    order = [(row.engine, row.case.num_speculative_tokens, row.pair) for row in result.rows]
    pairs = [("lowlat", 0, 0), ("transformers", 0, 0), ("transformers", 0, 1), ("lowlat", 0, 1)]
    assert order == [*pairs, ("lowlat", 2, 0), ("lowlat", 2, 1)]
    assert all(row.num_steps >= 10 and row.first_token_ms.p50 > 0 for row in result.rows)
    assert len(result.load) == len(result.rows) and min(result.load) >= 0
    alone = result.rows[-1]
    assert alone.against == "" and 1 < alone.accept_length < 3  # of ten steps
    missing = {(each.engine, each.case and each.case.num_speculative_tokens) for each in result.not_compared}
    assert missing == {("sglang", None), ("transformers", 2)}
    assert [(each.engine, each.figure, each.pairs) for each in result.comparisons] == [
        ("transformers", figure, 2) for figure in ("ms_per_step", "ms_per_token", "first_token_ms")
    ]
    step = result.comparisons[0]
    assert step.versions.keys() == {"lowlat", "transformers"} and step.ratio.lower <= step.ratio.median
    assert result.environment.model == "tiny" and "weights: random" in result.environment.simulated
    assert "| 1 x 24, S=0 | ms_per_step | 2 | " in capsys.readouterr().out
    broken = {**json.loads(out.read_text()), "version": 1}
    out.write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match="version 1"):
        bench("peers.results").read_peers(out)
    with pytest.raises(LowlatError, match="no geometry 'none'"):
        run._in_a_process(make_job("lowlat", geometry="none"), tmp_path, 120.0)


def row(engine: str, against: str, pair: int, ms: float, length: float | None = None) -> Any:
    spread = Spread.of([ms])
    return bench("peers.results").PeerRow(
        engine=engine, version="1", case=Case(16, 1, 0), settings={}, num_steps=1, steps_a_sample=1,
        ms_per_step=spread, ms_per_token=spread, first_token_ms=None, tokens_per_s=1.0, accept_length=length,
        memory=Memory(device_bytes=None, host_peak_bytes=1), against=against, pair=pair,
    )  # fmt: skip


def test_pairs_turn_their_order_round() -> None:
    names, schedule = ("vllm", "lowlat", "transformers"), bench("peers.pairs").schedule
    jobs = [make_job(name, depth) for depth in (0, 3) for name in names if depth == 0 or name == "lowlat"]
    found = [(job.engine, job.depth, against, pair) for job, against, pair in schedule(jobs, 2)]
    expected = []
    for name in ("vllm", "transformers"):
        expected += [("lowlat", 0, name, 0), (name, 0, "lowlat", 0), (name, 0, "lowlat", 1), ("lowlat", 0, name, 1)]
    assert found == [*expected, ("lowlat", 3, "", 0), ("lowlat", 3, "", 1)]
    assert [job.engine for job, _, _ in schedule(jobs[:1], 3)] == ["vllm"] * 3


def test_ratios_are_of_pairs_and_their_intervals_over_pairs() -> None:
    """A machine that is twice as slow in every other pair changes medians, and no ratio; half a pair says nothing."""
    compared = bench("peers.pairs").compared
    rows = [row("lowlat", "vllm", pair, 2.0 * (1 + pair % 2)) for pair in range(6)]
    rows += [row("vllm", "lowlat", pair, 3.0 * (1 + pair % 2)) for pair in range(7)]
    step, token = compared(rows)
    assert (step.figure, token.figure, step.pairs) == ("ms_per_step", "ms_per_token", 6)
    assert (step.ratio.median, step.ratio.lower, step.ratio.upper) == (1.5, 1.5, 1.5)
    assert (step.lowlat.median, step.other.median) == (3.0, 4.5) and step.lowlat.lower == 2.0 < step.lowlat.upper == 4.0
    assert [each.figure for each in compared(rows, [("vllm", Case(16, 1, 0), "ms_per_token")])] == ["ms_per_step"]


def test_engines_that_accept_otherwise_are_named() -> None:
    rows = [
        row("lowlat", "vllm", 0, 1.0, 2.0),
        row("vllm", "lowlat", 0, 1.0, 1.1),
        row("sglang", "lowlat", 0, 1.0, 2.01),
    ]
    (found,) = run.same_acceptance(rows)
    assert found.engine == "vllm" and "1.10 tokens a step, lowlat 2.00" in found.reason
