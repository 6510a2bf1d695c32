"""The logprobs of prompts: parity with transformers, chunks, neighbours, reused prefixes, ranks, refusals, ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Pair
from recording import outputs_of, prompt_of, tokens_of
from tiny_models import copying_draft_model, make_target

import lowlat
from lowlat import ConfigError, RequestError, Runtime, SamplingParams, SpeculativeConfig
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.options.request import StepOutput
from lowlat.step.prefill import build_prefills
from lowlat.step.variants import PASS

OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 160, "block_size": 4, "prefill_chunk": 16, "device": "cpu"}
DEMO = Path(lowlat.__file__).parent / "demo"


def run(runtime: Runtime, prompt: list[int], **params: Any) -> list[StepOutput]:
    name = runtime.submit(prompt, SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params}))
    outputs = [output for output in outputs_of(runtime) if output.request_id == name]
    runtime.scheduler.invariants()
    return outputs


def prompt_of_outputs(outputs: list[StepOutput]) -> PromptLogprobs:
    """Return the prompt's logprobs, which the first output alone has."""
    found = outputs[0].prompt_logprobs
    assert found is not None and not any(output.prompt_logprobs for output in outputs[1:])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random target and the same as transformers' model."""
    directory = tmp_path_factory.mktemp("prompts") / "target"
    return directory, make_target(directory, "qwen3")


@pytest.fixture(scope="module")
def runtime(model: tuple[Path, Any]) -> Any:
    """A runtime of it in float32, without a draft model."""
    with Runtime.load(model[0], dtype="float32", max_prefill_chunks=2, **OPTIONS) as loaded:
        yield loaded


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 100])
def test_they_are_transformers(runtime: Runtime, model: tuple[Path, Any], length: int) -> None:
    prompt = prompt_of(length, seed=length)
    found = prompt_of_outputs(run(runtime, prompt, prompt_logprobs=4))
    expected = torch.log_softmax(model[1](torch.tensor([prompt])).logits[0].double(), -1)
    assert len(found) == length and found[0] is None and found.prompt() == tuple(prompt)
    assert found.texts is None and repr(found) == f"PromptLogprobs({length} tokens, 4 likeliest each)"
    for place in range(1, length):
        one, row = found[place], expected[place - 1]
        assert one is not None and one.token_id == prompt[place]
        assert one.logprob == pytest.approx(float(row[prompt[place]]), abs=2e-4)
        own = [token for token, _ in one.top]
        assert sorted(own) == sorted(row.topk(4).indices.tolist()) and len(one.top) == 4
        for token, logprob in one.top:
            assert logprob == pytest.approx(float(row[token]), abs=2e-4)
        near = (row - row[prompt[place]]).abs() < 1e-3
        before = int(((row > row[prompt[place]]) & ~near).sum())
        assert before < one.rank <= before + int(near.sum())


def test_they_change_no_token_and_share_the_prefix_all_the_same(runtime: Runtime) -> None:
    prompt = prompt_of(70, seed=3)
    plain = tokens_of(run(runtime, prompt, temperature=0.8, seed=5))
    hits = runtime.kvcache.stats().hit_tokens
    first = run(runtime, prompt, temperature=0.8, seed=5, prompt_logprobs=20, logprobs=1)
    assert runtime.kvcache.stats().hit_tokens == hits, "a prefix was reused, of which nothing is known"
    assert tokens_of(first) == plain
    again = run(runtime, prompt, prompt_logprobs=20)
    assert prompt_of_outputs(again) == prompt_of_outputs(first)
    other = prompt_of(70, seed=4)
    run(runtime, other, prompt_logprobs=0)
    assert runtime.kvcache.stats().hit_tokens == hits
    run(runtime, other)
    assert runtime.kvcache.stats().hit_tokens == hits + 64, "what it wrote is shared"


def test_the_next_token_has_the_same_bits_as_when_it_was_drawn(runtime: Runtime) -> None:
    prompt = prompt_of(37, seed=9)
    drawn = run(runtime, prompt, logprobs=3, max_tokens=1)[0]
    assert drawn.logprobs is not None
    behind = prompt_of_outputs(run(runtime, [*prompt, *drawn.token_ids], prompt_logprobs=3))[-1]
    assert behind is not None and behind.rank == 1
    assert (behind.token_id, behind.logprob, behind.top) == (
        drawn.token_ids[0], drawn.logprobs[0].logprob, drawn.logprobs[0].top,
    )  # fmt: skip


def test_several_at_once_have_what_each_has_alone(runtime: Runtime) -> None:
    prompts = [prompt_of(length, seed=length) for length in (50, 9, 64, 33)]
    wanted = [3, None, 0, 20]
    alone = [run(runtime, prompt, prompt_logprobs=num) for prompt, num in zip(prompts, wanted, strict=True)]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=num) for num in wanted]
    names = [runtime.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    found: dict[str, list[StepOutput]] = {name: [] for name in names}
    while runtime.busy:
        for output in runtime.step():
            found[output.request_id].append(output)
    for together, single in zip(found.values(), alone, strict=True):
        assert tokens_of(together) == tokens_of(single)
        assert together[0].prompt_logprobs == single[0].prompt_logprobs


def test_top_is_bounded_by_the_vocabulary(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", vocab_size=16)
    with Runtime.load(tmp_path, **OPTIONS) as runtime:
        found = prompt_of_outputs(run(runtime, [1, 2, 3], prompt_logprobs=20))
    assert [None if one is None else len(one.top) for one in found] == [None, 16, 16]


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 2, "executor": "reference"}], ids=str
)
def test_beside_a_draft_model(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make_target(tmp_path / "target", "llama", gain=0.45, num_attention_heads=8, num_key_value_heads=4)
    copying_draft_model(tmp_path / "head", model)
    prompt = prompt_of(40, seed=2)
    draft = SpeculativeConfig(model=tmp_path / "head", num_speculative_tokens=3, strict=True)
    with Runtime.load(tmp_path / "target", draft, dtype="bfloat16", **OPTIONS, **options) as runtime:
        plain = tokens_of(run(runtime, prompt))
        outputs = run(runtime, prompt, prompt_logprobs=2)
    found = prompt_of_outputs(outputs)
    assert tokens_of(outputs) == plain
    expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    for place in range(1, 40):
        one = found[place]
        assert one is not None and one.logprob == pytest.approx(float(expected[place - 1, prompt[place]]), abs=0.3)


def test_texts_come_with_a_tokenizer() -> None:
    with Runtime.load(DEMO / "target", max_batch=1, max_context=128, device="cpu") as runtime:
        assert runtime.codec is not None
        prompt = runtime.codec.encode("The Congress shall have power")
        found = prompt_of_outputs(run(runtime, prompt, prompt_logprobs=1))
        assert b"".join(found.prompt_texts()).decode() == runtime.codec.decode(prompt)
        for one in found[1:]:
            assert one is not None and one.texts is not None
            assert one.texts == tuple(map(runtime.codec.token_bytes, (one.token_id, one.top[0][0])))


def test_what_is_not_kept_is_refused(tmp_path: Path) -> None:
    make_target(tmp_path, "llama")
    with Runtime.load(tmp_path, prompt_logprobs=False, **OPTIONS) as runtime:
        with pytest.raises(RequestError, match=r"prompt_logprobs: .*load it with prompt_logprobs"):
            runtime.submit([1, 2], SamplingParams(max_tokens=4, prompt_logprobs=0))
        assert "prompt_residual" not in runtime.executor.state
    with pytest.raises(RequestError, match="prompt_logprobs must be from 0 to 20, got 21"):
        SamplingParams(prompt_logprobs=21)
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        Runtime.load(tmp_path, prompt_logprobs=3, **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("poisoned", "position"), [(0, 1), (16, 17), (32, 33)])
def test_logits_that_are_not_finite_end_the_request_by_position(tmp_path: Path, poisoned: int, position: int) -> None:
    """Of the first chunk, of a middle one, and of the last, whose first token is lost with it."""
    make_target(tmp_path, "llama", tie_word_embeddings=False)
    prompt = [*range(40, 76)]
    with Runtime.load(tmp_path, dtype="float32", max_prefill_chunks=1, **OPTIONS) as runtime:
        executor: Any = runtime.executor
        executor._weights["embed.weight"][prompt[poisoned]] = torch.nan
        outputs = run(runtime, prompt, prompt_logprobs=1)
        assert [(each.finish_reason, each.error_code) for each in outputs] == [("error", "not_finite")]
        assert outputs[0].error == f"logits at position {position} are not finite"
        assert len(tokens_of(run(runtime, [1, 2, 3]))) == 6


def test_a_pass_is_lowered_to_kernels(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", hidden_size=128, intermediate_size=256, head_dim=64, vocab_size=256)
    pair = Pair(tmp_path)
    programs = build_prefills(pair.geometry)
    lowered = pair.lower_program(programs[PASS])
    names = [call.kernel.name.partition("_n128")[0].rstrip("_0123456789x") for call in lowered.calls]
    assert names == [
        "take_prompt_rows",
        "norms",
        "decode_gemm_float",
        "logprobs",
        "token_ranks",
        "keep_prompt_logprobs",
    ]
    largest = pair.lower_program(programs[max(programs)])
    leaves = largest.buffers["prompt_residual"].data_ptr()
    assert any(
        isinstance(each, torch.Tensor) and each.data_ptr() == leaves
        for call in largest.calls
        for each in call.arguments
    )
