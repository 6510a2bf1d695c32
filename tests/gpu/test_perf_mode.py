"""Strict mode on a GPU: the bundled pair decodes in it where plans were measured, and is refused elsewhere."""

from pathlib import Path
from typing import Any

import pytest

import lowlat
from lowlat import ConfigError, Runtime, SamplingParams, SpeculativeConfig

DEMO = Path(lowlat.__file__).parent / "demo"
HEAD = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=3)
OPTIONS: dict[str, Any] = {"max_batch": 1, "max_context": 512, "prompt_logprobs": False, "device": "cuda"}


@pytest.mark.parametrize("device_loop", [False, True])
def test_strict_decoding_launches_tuned_kernels_alone_and_waits_for_nothing(device_loop: bool) -> None:
    with Runtime.load(DEMO / "target", HEAD, **OPTIONS) as runtime:
        counters = runtime.perf()
    if counters.tuned_launches < counters.planned_launches or counters.fallback_calls:
        with pytest.raises(ConfigError, match="perf_mode 'strict'"):
            Runtime.load(DEMO / "target", HEAD, perf_mode="strict", **OPTIONS)
        return
    with Runtime.load(DEMO / "target", HEAD, perf_mode="strict", device_loop=device_loop, **OPTIONS) as runtime:
        runtime.submit("The Congress shall have power to", SamplingParams(max_tokens=200, ignore_eos=True))
        tokens = [token for output in iterate(runtime) for token in output.token_ids]
        counters = runtime.perf()
    assert len(tokens) == 200
    assert 0 < counters.planned_launches == counters.tuned_launches < counters.launches
    assert (counters.synchronisations, counters.copies, counters.fallback_calls) == (0, 0, 0)
    assert set(counters.undrafted_steps) <= {"last_token"}


def test_prefill_in_chunks_that_no_kernel_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"perf_mode 'strict' runs kernels.*the first linear in .*'s PREFILL"):
        Runtime.load(DEMO / "target", HEAD, perf_mode="strict", prefill_chunk=32, **OPTIONS)


def iterate(runtime: Runtime) -> Any:
    while runtime.busy:
        yield from runtime.step()
