"""Sizes that prefill has programs for, and what those of fewer rows share with the largest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prefill_cases import make_named
from recording import prompt_of
from tiny_models import make_target

from lowlat import Runtime, SamplingParams
from lowlat.errors import ConfigError
from lowlat.executors.allocation import first_rows
from lowlat.graphs import BufferSet, Role
from lowlat.step.prefill import build_prefills
from lowlat.step.variants import PASS


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4, 5]), (16, [1, 2, 3, 4, 6, 8, 12, 16])],
)
def test_sizes_are_a_half_apart_at_most(most: int, counts: list[int], tmp_path: Path) -> None:
    geometry = replace(make_named("llama", tmp_path).geometry, max_prefill_chunks=most)
    assert geometry.prefill_sizes == tuple(count * geometry.prefill_chunk for count in counts)
    for positions in range(1, geometry.prefill_sizes[-1] + 1):
        size = geometry.prefill_size(positions)
        chunks = -(-positions // geometry.prefill_chunk)
        assert positions <= size < 1.5 * chunks * geometry.prefill_chunk
    with pytest.raises(ConfigError, match=f"max_prefill_chunks {most} allow {most * geometry.prefill_chunk}"):
        geometry.prefill_size(geometry.prefill_sizes[-1] + 1)


@pytest.mark.parametrize(
    ("chunk", "sizes"), [(64, [64]), (96, [96]), (128, [64, 128]), (192, [192]), (256, [64, 128, 256])]
)
def test_short_prompts_and_ends_take_parts_of_a_chunk(chunk: int, sizes: list[int], tmp_path: Path) -> None:
    geometry = replace(make_named("llama", tmp_path).geometry, prefill_chunk=chunk, max_prefill_chunks=2)
    assert geometry.prefill_sizes == (*sizes, 2 * chunk)
    assert [geometry.prefill_size(size) for size in sizes] == sizes
    assert geometry.prefill_size(1) == sizes[0] and geometry.prefill_size(chunk + 1) == 2 * chunk
    programs = build_prefills(geometry)
    for size in geometry.prefill_sizes:
        program = programs[size]
        assert program.buffers["prefill_tokens"].shape == (size,)
        assert {op.params["chunk_size"] for op in program.ops if op.kind == "prefill_attention"} == {chunk}


def test_programs_of_fewer_rows_read_the_first_that_the_host_writes(tmp_path: Path) -> None:
    geometry = replace(make_named("llama", tmp_path).geometry, max_prefill_chunks=3)
    programs = build_prefills(geometry)
    assert list(programs) == [PASS, *geometry.prefill_sizes]
    largest = programs[geometry.prefill_sizes[-1]]
    state = BufferSet(largest.specs(Role.STATE, Role.COMMAND, Role.PUBLICATION), torch.device("cpu"))
    for size in geometry.prefill_sizes:
        program = programs[size]
        own = first_rows(program, state)
        assert set(own) == (
            set() if program is largest else {name for name in own if name.startswith(("prefill_", "prompt_res"))}
        )
        for spec in program.specs(Role.COMMAND, Role.STATE):
            found = {**state, **own}[spec.name]
            assert tuple(found.shape) == spec.shape
            assert found.data_ptr() == state[spec.name].data_ptr()
        assert program.buffers["prefill_tokens"].shape == (size,)


def test_chunks_of_the_pace_run_between_the_steps_of_who_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run of chunks is timed by its number, and whoever decodes gets a token after each."""
    make_target(tmp_path, "llama")
    options: dict[str, Any] = {"device": "cpu", "max_batch": 2, "max_context": 160, "block_size": 4, "prefill_chunk": 8}
    with Runtime.load(tmp_path, **options) as runtime:
        seen: list[float] = []
        monkeypatch.setattr(runtime.scheduler.pace, "saw", lambda count, _: seen.append(count))
        runtime.scheduler.pace.num_chunks = 2
        decoding = runtime.submit(prompt_of(44), SamplingParams(max_tokens=40, ignore_eos=True))
        runtime.step()
        runtime.submit(prompt_of(60, seed=1), SamplingParams(max_tokens=2))
        got = [sum(output.request_id == decoding for output in runtime.step()) for _ in range(6)]
    assert seen == [6, 2, 2, 2, 2] and got == [1, 1, 1, 1, 0, 1]


def test_chunks_of_fewer_rows_than_a_block_have_the_same_bits_together(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen3", num_hidden_layers=2)
    found = []
    for most in (1, 4):
        options: dict[str, Any] = {"max_batch": 1, "max_context": 32, "block_size": 1, "max_prefill_chunks": most}
        with Runtime.load(tmp_path, device="cpu", prefill_chunk=2, **options) as runtime:
            runtime.submit(prompt_of(22), SamplingParams(max_tokens=1, logprobs=5))
            found.append([output.logprobs for _ in range(12) for output in runtime.step()])
    assert found[0] == found[1] and found[0]
