"""Made-up benchmark results, for tests of reports and comparisons of them."""

from collections.abc import Sequence
from typing import Any

from lowlat.tools.bench.results import (
    ActiveSlots,
    Environment,
    Memory,
    Repeat,
    Result,
    Row,
    Speculation,
    Spread,
)
from lowlat.tools.bench.scenarios import Case, Scenario

__all__ = ["environment", "result", "row"]


def environment(**others: Any) -> Environment:
    values: dict[str, Any] = {
        "lowlat": "1", "commit": "abc", "python": "3", "torch": "2", "cuda": "13", "gpu": "A GPU", "driver": "580",
        "processor": "a processor", "cores": 2, "threads": 1, "executor": "graph", "device_loop": False,
        "dtype": "bfloat16", "model": "m<1>", "speculator": "eagle3", "prompts": "text", "distinct_prompt_tokens": 9,
        "temperature": 0.0, "simulated": (),
    }  # fmt: skip
    return Environment(**{**values, **others})


def row(case: Case, ms: Sequence[float] = (4.0, 4.1, 4.2), *, accept: float = 2.5, **others: Any) -> Row:
    """A row whose repeats have these medians."""
    depth = case.num_speculative_tokens
    length = accept if depth else 1.0
    counts = [10] * depth + [0] * (7 - depth)
    stats = Speculation(
        num_drafts=10, total_draft_tokens=10 * depth, total_accepted_tokens=15, mean_acceptance_rate=0.5,
        mean_acceptance_length=accept, fraction_accepted_ge2=0.5, num_rewound_tokens=15, rewind_steps=8,
        accepted_length_histogram=[0] * 8, acceptance_by_position=[0.5] * 7, drafted_by_position=counts,
        accepted_by_position=[5] * 7, simulated=False,
    )  # fmt: skip
    speed = [1e3 * case.batch * length / each for each in ms]
    values: dict[str, Any] = {
        "num_steps": 30, "num_tokens": 60, "mean_context": case.context + 10.0, "ms_per_step": Spread.of(ms),
        "ms_per_token": Spread.of([each / length for each in ms]), "time_to_first_token_ms": Spread.of([50.0]),
        "tokens_per_s": sum(speed) / len(speed), "effective_accept_length": length,
        "active_slots": ActiveSlots(min=case.batch, mean=case.batch, max=case.batch), "bytes_per_step": 10**10,
        "distinct_experts": None, "wall_gb_per_s": 4000.0, "floor_ms": 2.5, "share_of_wall": 0.6,
        "memory": Memory(device_bytes=1, host_peak_bytes=2), "eagle_speculation": stats if depth else None,
        "repeats": tuple(
            Repeat(ms_per_step_p50=each, ms_per_step_p99=each, tokens_per_s=rate,
                   accept_length=accept if depth else None, time_to_first_token_ms=None)
            for each, rate in zip(ms, speed, strict=True)
        ),
    }  # fmt: skip
    return Row(case=case, **{**values, **others})


def result(*rows: Row, name: str = "single", **others: Any) -> Result:
    scenario = Scenario((8192,), (1,), (0, 3))
    return Result(
        name=name, scenario=scenario, environment=environment(), rows=list(rows), **{"complete": True, **others}
    )
