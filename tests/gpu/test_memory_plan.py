"""The memory plan next to what the GPU says: nothing large is held that is not planned, nor planned and not held."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lowlat
from lowlat import Runtime, SpeculativeConfig
from lowlat.engine.loading.pool_size import MARGIN_BYTES, MARGIN_SHARE
from lowlat.engine.memory.held import PARTS
from lowlat.engine.memory.plan import available_bytes

DEMO = Path(lowlat.__file__).parent / "demo"
# gigabytes of keys and values, next to which a context, code and graphs are as little as next to a large model
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 2048, "kv_blocks": 160_000, "device": "cuda:0"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {  # the depth of drafts, and options
    "bf16": (3, {}),
    "fp8": (3, {"quantize": "fp8", "kv_cache_dtype": "fp8"}),
    "int4": (3, {"quantize": "int4"}),
    "adaptive loop": ("auto", {"device_loop": True}),
}
pytestmark = pytest.mark.alone  # free memory of the GPU is counted, which tests beside these take, too
TURNS = 3  # other processes may take memory of the GPU or give it back meanwhile


def loaded(name: str) -> tuple[int, int]:
    """Bytes that a runtime's parts that stay were planned to take, and by how many the GPU's free memory fell."""
    depth, options = CASES[name]
    drafts = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=depth, strict=True)
    before = _free_bytes()
    with Runtime.load(DEMO / "target", drafts, **OPTIONS, **options) as runtime:
        taken = before - _free_bytes()  # what packing took and gave back is not held
        (held,) = runtime.summary()["memory"]
    return sum(held[part] for part in PARTS), taken


def _free_bytes() -> int:
    free = available_bytes(torch.device(OPTIONS["device"]))
    assert free is not None
    return free


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_two_per_cent_of_the_gpu_s_own_count(name: str) -> None:
    loaded(name)  # the context, and code that stays
    found = [loaded(name) for _ in range(TURNS)]
    assert all(planned > 2 << 30 for planned, _ in found)
    assert any(abs(taken - planned) <= 0.02 * planned for planned, taken in found), found


def test_a_kv_cache_of_all_that_is_free_leaves_the_margin() -> None:
    """Graphs, code and what the plan is wrong by are within it; the tokens are those of the usual cache."""
    drafts = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=3, strict=True)
    options = {name: value for name, value in OPTIONS.items() if name != "kv_blocks"}
    with Runtime.load(DEMO / "target", drafts, **options) as runtime:  # the context, and code that stays
        expected = runtime.generate("The President shall", max_tokens=32, temperature=0.0).token_ids
    before = _free_bytes()
    with Runtime.load(DEMO / "target", drafts, **options, kv_cache_gib="free") as runtime:
        assert runtime.generate("The President shall", max_tokens=32, temperature=0.0).token_ids == expected
        left = _free_bytes()
        runtime.kvcache.invariants()
    margin = MARGIN_BYTES + before // MARGIN_SHARE
    assert MARGIN_BYTES // 4 < left < 2 * margin, (before, left)
