"""Tuning on a GPU: a plan changes no bit, and what `lowlat tune` writes is what a runtime takes, strict or not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import lowlat
from needed_gpus import need_gpus

import lowlat as package
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.kernels.tuning.choice import file_name
from lowlat.options.runtime import RuntimeConfig
from lowlat.tools.tune.arguments import Places
from lowlat.tools.tune.bench import GpuBench
from lowlat.tools.tune.cases import cases_of
from lowlat.tools.tune.pairs import PairPrograms, Sizes, cut_pair, open_pair, random_pair
from lowlat.tools.tune.results import check_table
from lowlat.tools.tune.run import kinds_of
from lowlat.tools.tune.shapes import calls_by_plan, collect

pytestmark = pytest.mark.gpu

DEMO = Path(package.__file__).parent / "demo"
HEAD = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=3)
NUM_PLANS = 5
TEXT = "The Congress shall have power to"


@pytest.fixture
def bench() -> GpuBench:
    return GpuBench(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("command", "gpus"), [("gemm", 1), ("attention", 1), ("experts", 1), ("gemm", 2), ("experts", 2)]
)
def test_every_plan_of_a_launch_leaves_the_same_bits(command: str, gpus: int, bench: GpuBench, tmp_path: Path) -> None:
    """In all that a step reads of it; partial sums and partial argmaxes are a plan's own. Of one of two ranks, whose
    numbers come back to it, the launches that add them up; nobody waits in vain."""
    source = open_pair(DEMO / "target", DEMO / "head")
    if command == "experts":
        source = random_pair("tiny-experts", tmp_path)
    source = cut_pair(source, RuntimeConfig(tensor_parallel_size=gpus))
    pair = PairPrograms(source, bench.gpu, Sizes((1, 4, 8), (0, 2, 7)))
    shapes = collect([pair], bench.gpu, kinds_of(command))[:: 2 if command == "gemm" else 1]
    if gpus > 1:
        shapes = [shape for shape in shapes if "gpus=" in shape.key]
    assert shapes
    calls = calls_by_plan(shapes, bench.gpu, 99 if command != "gemm" else NUM_PLANS)
    bench.compile([call for variants in calls.values() for each in variants for call in each])
    own = {tensor.untyped_storage()._cdata for tensor in pair.workspace.tensors()}
    exchanged = {each for variant in calls.values() for each in memory_of_all_reduces(variant)}
    for shape in shapes:
        places = Places(torch.device("cuda", 0), pair.weights.tensors(), 0)
        derived = places.place(calls[shape.place][0], 0)
        for case, state in zip(cases_of(shape.kind, derived), cases_of(shape.kind, derived, 0), strict=True):
            left = list[dict[int, torch.Tensor]]()
            for variant in calls[shape.place]:
                torch.manual_seed(7)
                case.fill(derived, 0)  # whatever a plan's own arguments are, the common ones have the same numbers
                placed = state.fill(places.place(variant, 0), 0)
                bench.launcher.run(*placed)
                torch.cuda.synchronize()
                found = common(variant, placed, own | exchanged)
                left.append({name: tensor.clone() for name, tensor in found.items()})
            for number, found in enumerate(left[1:], 1):
                assert found.keys() == left[0].keys()
                same = [torch.equal(found[name].view(torch.uint8), left[0][name].view(torch.uint8)) for name in found]
                assert all(same), f"{shape.place}, {case.name}: plan {shape.candidates[number]}"
        assert pair.abort is None or not places.read(pair.abort).any()


def memory_of_all_reduces(variants: Sequence[Sequence[KernelCall]]) -> set[int]:
    """Storages of what ranks exchange by, which counts exchanges."""
    tensors = (
        each for calls in variants for call in calls for each in call.arguments if isinstance(each, torch.Tensor)
    )
    return {each.untyped_storage()._cdata for each in tensors if each.dtype == torch.int64 and each.dim() == 4}


def common(variant: tuple[KernelCall, ...], placed: tuple[KernelCall, ...], own: set[int]) -> dict[int, torch.Tensor]:
    """The arguments that are no workspace, each once."""
    found: dict[int, torch.Tensor] = {}
    for before, after in zip(variant, placed, strict=True):
        for meta, tensor in zip(before.arguments, after.arguments, strict=True):
            if isinstance(meta, torch.Tensor) and isinstance(tensor, torch.Tensor):
                storage = meta.untyped_storage()._cdata
                if storage not in own:
                    found.setdefault(storage, tensor)
    return found


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_was_tuned_is_what_a_runtime_launches(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU, and on two, whose launches the first one has measured alone."""
    need_gpus(gpus)
    monkeypatch.setenv("LOWLAT_TUNING", str(tmp_path))
    options: dict[str, Any] = {
        "max_batch": 1, "max_context": 512, "device": "cuda", "tensor_parallel_size": gpus,
        "prompt_logprobs": False,  # tables are complete for what strict mode runs
    }  # fmt: skip
    with Runtime.load(DEMO / "target", HEAD, **options) as runtime:
        derived = decode(runtime)
    sizes: tuple[str | int, ...] = ("--batch", 1, "-S", "0,1,2,3,4,5,6,7", "--candidates", 2, "--budget-s", 200)
    sizes += ("--max-prefill-chunks", 4, "--tensor-parallel", gpus)
    result = lowlat("tune", "all", *sizes)
    assert result.exit_code == 0, result.output
    path = tmp_path / file_name(torch.cuda.get_device_name(0))
    assert all(entry.best_us > 0 for entries in check_table(path).entries.values() for entry in entries.values())
    with Runtime.load(DEMO / "target", HEAD, **options) as runtime:
        counters = runtime.perf()
        assert 0 < counters.tuned_launches == counters.planned_launches
    if not counters.fallback_calls:
        with Runtime.load(DEMO / "target", HEAD, perf_mode="strict", **options) as runtime:
            assert decode(runtime) == derived
    again = lowlat("tune", "all", *sizes, "--missing", "--json")
    assert again.exit_code == 0 and json.loads(again.stdout.splitlines()[-1])["timed"] == 0


def decode(runtime: Runtime) -> list[int]:
    runtime.submit(TEXT, SamplingParams(max_tokens=60, ignore_eos=True))
    tokens: list[int] = []
    while runtime.busy:
        tokens += [token for output in runtime.step() for token in output.token_ids]
    return tokens
