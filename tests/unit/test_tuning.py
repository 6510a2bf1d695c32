"""Tuning: tables, the choice of plans by them, launches of a pair and their sweep; nothing here needs a GPU."""

import dataclasses
import itertools
import logging
import math
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_calls import answer, lowlat, refusal
from kernel_inventory import GPUS

import lowlat as package
from lowlat.cli.options import bundled
from lowlat.errors import ConfigError, DeviceError
from lowlat.kernels.gemm.decode.plan import candidate_plans, plan_decode_gemm, steps_to_hold
from lowlat.kernels.gemm.prefill.plan import plans_of
from lowlat.kernels.toolchain.kernel import H200, Gpu, KernelCall
from lowlat.kernels.tuning.choice import file_name, find_table, tuned_gpu
from lowlat.kernels.tuning.table import SHIPPED, Entry, TuningTable, choose_plan, key_of, read_table
from lowlat.options.directories import tuning_directory, uses_tuning_tables
from lowlat.options.runtime import RuntimeConfig
from lowlat.tools.bench.geometry import read_geometries
from lowlat.tools.profile import wall
from lowlat.tools.tune import bench as gpu_bench
from lowlat.tools.tune.arguments import Places, fill_numbers
from lowlat.tools.tune.estimates import Estimates
from lowlat.tools.tune.pairs import Pair, PairPrograms, Sizes, cut_pair, open_pair, random_pair, rounded_pair, sizes_of
from lowlat.tools.tune.results import check_table, table_of, write_table
from lowlat.tools.tune.run import Tuned, kinds_of, listed, tune
from lowlat.tools.tune.shapes import Shape, calls_by_plan, collect
from lowlat.tools.tune.sweep import Swept, sweep

DEMO = Path(package.__file__).parent / "demo"
FEW = Sizes((1, 4), (0, 3))
# all that a table may choose; what decides bits is none of it
KNOBS = {
    "decode_gemm": {"weight_tiles", "stages", "areas"},
    "prefill_gemm": {"rows", "depth", "stages", "apart", "cluster"},
    "attention": {"row_tiles", "stages", "blocks"},
    "experts": {"stages", "part", "columns"},
    "experts_mlp": {"stages", "part", "columns", "overlaps"},
    "experts_grouped": {"pairs", "warps", "stages"},
}
OF_CODES = {"span", "density"}  # and of decode GEMMs over weights of 8 and 4 bits
NOT_COVERED = "tiny"  # heads of 16 dimensions
TUNED_HYBRIDS = {"qwen3.6-35b-a3b": [Sizes((1, 2, 4), (0,), max_prefill_chunks=16)], "qwen3.5-27b": [Sizes((1,), (0,))]}
ROUNDED = (("qwen3.5-27b", "fp8"), ("qwen3.5-27b", "int4"), ("gemma-4-31b", "fp8"))
WITHOUT_ENTRIES = (
    NOT_COVERED,
    "tiny-experts",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
    "qwen3-coder-next",
)  # in any shipped table


@pytest.fixture(scope="module")
def pair() -> Pair:
    return open_pair(DEMO / "target", DEMO / "head")


@pytest.fixture(scope="module")
def programs(pair: Pair) -> PairPrograms:
    return PairPrograms(pair, H200, FEW)


@pytest.fixture(scope="module")
def shapes(programs: PairPrograms) -> list[Shape]:
    return collect([programs], H200, kinds_of("gemm"))


def table(gpu: str = "A GPU", of: Gpu = H200, **entries: dict[str, Entry]) -> TuningTable:
    return TuningTable(gpu, of.capability, of.num_multiprocessors, of.shared_bytes, entries=entries)


def test_a_table_is_read_as_it_was_written_and_another_one_takes_precedence(tmp_path: Path) -> None:
    first = table(kind={"a": Entry({"x": 1, "y": True}, 2.5, 2.0, ("BASE_O",)), "b": Entry({"x": 2})}, other={})
    first.write(tmp_path / "folder" / "a-gpu.json")
    found = read_table(tmp_path / "folder" / "a-gpu.json")
    assert dataclasses.asdict(found) == dataclasses.asdict(first) and len(found) == 2
    assert check_table(tmp_path / "folder" / "a-gpu.json").entries["kind"]["a"].knobs["y"] is True
    both = found.merged(table(kind={"b": Entry({"x": 3})}, new={"c": Entry({})}))
    assert [both.find("kind", key) for key in "abc"] == [{"x": 1, "y": True}, {"x": 3}, None] and len(both) == 3


def test_a_table_that_is_broken_off_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "a-gpu.json", Path.write_text
    table(kind={"a": Entry({"x": 1})}).write(path)

    def half(self: Path, text: str, **options: str) -> int:
        write(self, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        table(kind={"b": Entry({"x": 2})}).write(path)
    assert read_table(path).find("kind", "a") == {"x": 1}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "no tuning table"),
        ("{", "no tuning table"),
        ('{"format": 1}', "of format 1, not 2"),
        ('{"format": 2, "GPU": "x"}', "KeyError"),
    ],
)
def test_a_damaged_table_is_refused_and_left_out_with_a_warning(
    content: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a-gpu.json").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_table(tmp_path / "a-gpu.json")
    with caplog.at_level(logging.WARNING):
        assert find_table("A GPU", H200, tmp_path, tmp_path / "none") is None
    assert problem in caplog.text


def test_a_folder_of_tables_that_may_not_be_entered_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shipped, stat = tmp_path / "own", tmp_path / "shipped", Path.stat
    table(kind={"a": Entry({"x": 1})}).write(shipped / "a-gpu.json")

    def forbidden(self: Path, **options: bool) -> os.stat_result:
        if self.parent == own:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", forbidden)
    with caplog.at_level(logging.WARNING):
        found = find_table("A GPU", H200, own, shipped)
    assert found is not None and found.find("kind", "a") == {"x": 1}
    assert "own/a-gpu.json: no tuning table: Permission denied; LOWLAT_TUNING names another" in caplog.text


def test_a_gpu_has_its_own_table_and_the_user_s_entries_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"
    table(kind={"a": Entry({"x": 1}), "b": Entry({"x": 1})}).write(shipped / "a-gpu.json")
    table(kind={"b": Entry({"x": 2})}).write(own / "a-gpu.json")
    table("Another GPU").write(shipped / "a-gpu-.json")
    with caplog.at_level(logging.INFO):
        tuned_gpu("A GPU", H200, own, shipped)
        found = tuned_gpu("A GPU", H200, own, shipped).tuning
        assert tuned_gpu("B GPU", H200, own, shipped).tuning is None
    assert found is not None and (found.find("kind", "a"), found.find("kind", "b")) == ({"x": 1}, {"x": 2})
    assert caplog.text.count("tuning table of A GPU: 2 plans") == 1
    assert "B GPU has no tuning table: plans are derived" in caplog.text and "`lowlat tune`" in caplog.text
    part = dataclasses.replace(H200, num_multiprocessors=16)  # as one of several instances on a GPU
    assert find_table("A GPU", part, own, shipped) is None
    assert dataclasses.replace(H200, tuning=found) == H200


def test_a_plan_is_an_entry_s_where_that_is_a_candidate_s() -> None:
    plans = candidate_plans(4, 4096, H200)
    facts = {"rows": 4, "normed": False}
    key = key_of(facts)
    assert key == "rows=4 normed=0"
    assert choose_plan(None, "kind", facts, plans)[0] is plans[0]
    for knobs, wanted in ((plans[3].knobs, plans[3]), ({"stages": 99}, plans[0])):
        plan, planned = choose_plan(table(kind={key: Entry(knobs)}), "kind", facts, plans)
        assert plan is wanted and planned.is_tuned == (wanted is plans[3])
        assert (planned.kind, planned.key, planned.candidates) == ("kind", key, plans)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=map(str, GPUS))
def test_candidates_fit_the_gpu_differ_in_knobs_and_begin_with_the_derived_one(gpu: Gpu) -> None:
    for rows, width, held in itertools.product((1, 2, 4, 8, 16, 32, 64), (97, 2880, 28672), (False, True)):
        steps = steps_to_hold(rows, 2880, gpu) if held else 0
        try:
            plans = candidate_plans(rows, width, gpu, steps)
        except ConfigError:
            assert gpu.shared_bytes < 128 * 1024 and rows > 8
            continue
        assert plans[0] == plan_decode_gemm(rows, width, gpu, steps)
        assert len({tuple(plan.knobs.values()) for plan in plans}) == len(plans) > 1
        assert all(plan.shared_bytes <= gpu.shared_bytes for plan in plans)
        fixed = {(p.row_tiles, p.columns, p.steps_held, p.keeps_argmax, p.suspends) for p in plans}
        assert len(fixed) == 1 and set(plans[0].knobs) == KNOBS["decode_gemm"]
    if gpu.capability == (9, 0):
        for rows, matrix in itertools.product((64, 128, 512), ((6144, 4096), (4096, 14336), (200, 72))):
            wide = plans_of(rows, *matrix, gpu)
            assert len({tuple(plan.knobs.values()) for plan in wide}) == len(wide)
            assert {*wide[0].knobs} == KNOBS["prefill_gemm"]


@pytest.mark.second
def test_launches_of_a_pair_are_met_by_their_stages(shapes: list[Shape], programs: PairPrograms) -> None:
    tags = {tag for shape in shapes for tag in shape.stages}
    parts = ("QKV", "O", "FFN_GATE_UP", "FFN_DOWN")
    assert {f"BASE_{part}" for part in (*parts, "LM_HEAD")} <= tags
    assert {"EAGLE3_FC", "EAGLE3_Q", "EAGLE3_KV", "EAGLE3_FFN_GATE_UP", "EAGLE3_LM_HEAD"} <= tags
    assert {f"PREFILL_{part}" for part in parts} <= tags and "EAGLE3_PREFILL_FC" in tags
    assert len({shape.place for shape in shapes}) == len(shapes)
    keys = [shape.key for shape in shapes if "BASE_LM_HEAD" in shape.stages]
    planned = [c.planned for p in programs.programs for g in programs.groups(p, H200) for c in g.kernel_calls]
    assert {each.kind for each in planned if each is not None} <= set(kinds_of("all"))
    assert any("N=4096 K=320 epilogue=float32 normed=1 argmax=1" in key for key in keys)


@pytest.mark.second
def test_a_launch_has_a_kernel_for_each_of_its_plans(shapes: list[Shape]) -> None:
    calls = calls_by_plan(shapes, H200, 3)
    for shape in shapes:
        variants = calls[shape.place]
        assert len(variants) == min(3, len(shape.candidates))
        names = {tuple(call.kernel.name for call in each) for each in variants}
        assert len(names) == len(variants)
        for number, each in enumerate(variants):
            (cut,) = [call.planned for call in each if call.planned is not None and call.planned.key == shape.key]
            assert cut.is_tuned and cut.candidates[number] == shape.candidates[number]
        if shape.kind == "prefill_gemm":
            assert all(each[0].kernel.name.startswith("prefill_gemm") for each in variants)


def test_arguments_get_memory_that_is_aliased_as_before(shapes: list[Shape], programs: PairPrograms) -> None:
    """Of a GEMM whose segments of K another launch adds up."""
    wide = [shape for shape in shapes if shape.kind == "prefill_gemm"]
    every = calls_by_plan(wide, H200, 12).values()
    calls = next(each for variants in every for each in variants if len(each) == 2)
    places = Places(torch.device("cpu"), programs.weights.tensors(), programs.weight_bytes)
    copies = places.num_copies(calls)
    assert 1 < copies <= 64
    placed = [places.place(calls, copy) for copy in range(2)]
    for each in placed:
        fill_numbers(each)
    (gemm, total), (other, again) = placed
    shared = {t.data_ptr() for t in total.arguments if isinstance(t, torch.Tensor)}
    assert any(t.data_ptr() in shared for t in gemm.arguments if isinstance(t, torch.Tensor))
    weights = [call.arguments[0] for call in (gemm, other)]
    assert all(isinstance(weight, torch.Tensor) and weight.std() > 0 for weight in weights)
    assert weights[0].data_ptr() != weights[1].data_ptr()  # type: ignore[union-attr]
    columns = [t for t in gemm.arguments if isinstance(t, torch.Tensor) and t.dtype == torch.int32]
    assert all(len(set(t.tolist())) == t.numel() for t in columns)
    assert total.arguments[0].data_ptr() == again.arguments[0].data_ptr()  # type: ignore[union-attr]


class FakeBench:
    """A device on which a launch's plan number 2 takes half of the derived one's time."""

    def __init__(self, seconds_a_kernel: float = 0.0) -> None:
        self.compiled: list[str] = []
        self.seconds_a_kernel = seconds_a_kernel
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def compile(self, calls: Sequence[KernelCall]) -> None:
        assert not {call.kernel.name for call in calls} & set(self.compiled)
        self.compiled += [call.kernel.name for call in calls]
        self.now += self.seconds_a_kernel * len(calls)

    def times_us(self, shape: Shape, plans: Sequence[Sequence[KernelCall]]) -> dict[str, list[float]]:
        self.now += 1.0
        times = [10.0, 9.95, 5.0, math.inf][: len(plans)]
        return {"": [math.inf] * len(plans) if "K=960" in shape.key else times}


def four_plans(shapes: Sequence[Shape]) -> dict[tuple[str, str], list[tuple[KernelCall, ...]]]:
    return calls_by_plan(shapes, H200, 4)


@pytest.mark.second
def test_the_sweep_keeps_the_fastest_plan_and_writes_it(shapes: list[Shape], tmp_path: Path) -> None:
    bench, done, kept = FakeBench(), list[tuple[int, int]](), list[Swept]()
    swept = sweep(
        shapes, four_plans, bench, Estimates(4), until=1e9, keep=kept.append, progress=lambda *at: done.append(at),
        clock=bench.clock,
    )  # fmt: skip
    assert len(bench.compiled) == len(set(bench.compiled)) and done[-1] == (len(shapes), len(shapes)) and kept == swept
    assert {each.shape.place for each in swept} == {s.place for s in shapes if "K=960" not in s.key}
    for each in swept:
        assert each.best == 2 and each.plan is each.shape.candidates[2] and each.gain == 0.5
    assert Swept(shapes[0], (10.0, 9.95)).best == 0  # within noise
    made = write_table(table_of(swept, "A GPU", H200, driver="580", commit="abc", read_gb_s=4600.04), tmp_path / "t")
    assert write_table(made, tmp_path / "t").find(*swept[0].shape.place) == dict(swept[0].plan.knobs)
    assert check_table(tmp_path / "t").entries["decode_gemm"][swept[0].shape.key].default_us == 10.0
    with pytest.raises(ConfigError, match="is of A GPU, not of B GPU"):
        write_table(table_of(swept, "B GPU", H200), tmp_path / "t")
    (tmp_path / "t").write_text('{"format": 2, "more": 2}')
    with pytest.raises(ConfigError, match="no tuning table"):
        check_table(tmp_path / "t")


def test_a_budget_is_spent_on_the_first_launches_that_fit(shapes: list[Shape]) -> None:
    """Each has all of its plans, what is left is for the next run, and one that takes longer is passed over."""
    bench = FakeBench(seconds_a_kernel=0.1)
    estimates = Estimates(4, num_cores=1)
    swept = sweep(shapes, four_plans, bench, estimates, until=12.0, clock=bench.clock)
    assert 4 < len(swept) < len(shapes) and 10.0 < bench.now <= 13.0
    done = [shapes.index(each.shape) for each in swept]
    assert done == sorted(done) and done[:4] == [n for n, s in enumerate(shapes) if "K=960" not in s.key][:4]
    assert all(len(each.times_us) == min(4, len(each.shape.candidates)) for each in swept)
    assert estimates.timing_s(shapes[0]) == pytest.approx(1.0)  # learnt: a second a launch
    assert estimates.compiling_s(10) == pytest.approx(1.0)
    slow = dataclasses.replace(shapes[0], kind="attention")
    assert estimates.fitting([slow, shapes[0]], 0.5 + estimates.seconds(shapes[0])) == [shapes[0]]
    assert estimates.fitting(shapes, 0.5) == []


def test_a_device_that_fails_leaves_what_was_timed_before(
    shapes: list[Shape], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = FakeBench()
    timed = bench.times_us

    def times_us(shape: Shape, plans: Any) -> Any:
        if shape is shapes[2]:
            raise DeviceError("the device failed")
        return timed(shape, plans)

    monkeypatch.setattr(bench, "times_us", times_us)
    swept = sweep(shapes[:5], four_plans, bench, Estimates(4), until=1e9, clock=bench.clock)
    assert [each.shape for each in swept] == shapes[:2] and "3 launches are left out" in caplog.text


@pytest.mark.second
def test_the_command_lists_launches_and_plans_without_a_gpu(pair: Pair) -> None:
    options = ("tune", "gemm", "--list", "--batch", 1, "-S", "0,2", "--candidates", 2)
    found = answer(*options, "--json")["shapes"]
    assert all({*each["plans"][0]} == KNOBS[each["kind"]] and len(each["plans"]) == 2 for each in found)
    assert {shape.place for shape in listed([pair], "gemm", [Sizes((1,), (0, 2))])} == {
        (each["kind"], each["key"]) for each in found
    }
    rounded = answer(*options, "--json", "--quantize", "fp8", "--draft-quantize", "fp8")["shapes"]
    assert {stage for each in rounded if "weights=fp8" not in each["key"] for stage in each["stages"]} == {
        "BASE_LM_HEAD"
    }
    both = answer("tune", "gemm", *options[2:], "--json", "--geometry", "tiny-experts", "--draft-vocabulary", "both")
    assert {n for n in (160, 512) if any(f"N={n} " in each["key"] for each in both["shapes"])} == {160, 512}
    assert both["by_kind"]["decode_gemm"][0] == both["by_kind"]["decode_gemm"][1] and both["timing_s"] > 0
    coded = answer("tune", "attention", *options[2:], "--json", "--kv-cache-dtype", "fp8")["shapes"]
    assert coded and all("coded=" in each["key"] for each in coded)
    shown = lowlat(*options, "--geometry", "tiny-experts").output
    assert "EAGLE3_LM_HEAD_SMALLVOC" in " ".join(shown.split()) and "launches of tiny-experts" in shown
    assert "needs an NVIDIA GPU" in refusal("tune", "--device", "cpu")
    assert "head_dim 64, 128, 256 or 512" in refusal("tune", "--list", "--geometry", NOT_COVERED)
    assert "geometry 'x' is not known; there are" in refusal("tune", "--list", "--geometry", "x")
    assert "--draft-model needs --model" in refusal("tune", "--draft-model", bundled("head"))
    assert "needs a draft model to round" in refusal("tune", "--model", bundled("target"), "--draft-quantize", "fp8")
    assert "--batch takes slots" in refusal("tune", "--batch", "0")


def test_tables_are_left_out_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWLAT_TUNING", str(tmp_path))
    assert uses_tuning_tables() and tuning_directory() == tmp_path
    monkeypatch.setenv("LOWLAT_TUNING", "off")
    assert not uses_tuning_tables() and tuning_directory().name == "tuning"


def test_a_run_writes_the_gpu_s_table_and_goes_on_where_it_ended(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWLAT_TUNING", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(wall, "measure_wall", lambda *sizes: SimpleNamespace(gb_per_s=4500.0))

    def run(broken_off_after: float = math.inf, **options: Any) -> Tuned:
        fake: Any = FakeBench()
        fake.gpu, timed = H200, fake.times_us

        def times_us(shape: Shape, plans: Any) -> Any:
            if fake.now >= broken_off_after:
                raise KeyboardInterrupt
            return timed(shape, plans)

        monkeypatch.setattr(fake, "times_us", times_us)
        monkeypatch.setattr(gpu_bench, "GpuBench", lambda device: fake)
        given = {"num_candidates": 3, "budget_s": 1e9, "only_missing": False, "out": None, "commit": "abc", **options}
        return tune([pair], "gemm", [Sizes((1,), (0,))], torch.device("cpu"), bar=lambda _: nullcontext(), **given)

    with pytest.raises(KeyboardInterrupt):
        run(3.0, out=tmp_path / "broken-off.json")
    first = run()
    places = [each.shape.place for each in first.swept]
    assert [each.shape.uses for each in first.swept] == sorted((s.shape.uses for s in first.swept), reverse=True)
    kept = read_table(tmp_path / "broken-off.json").entries
    assert {(kind, key) for kind, entries in kept.items() for key in entries} == set(
        places[: sum(map(len, kept.values()))]
    )
    assert first.path == tmp_path / "a-gpu.json" and first.left_s > 0 and len(first.table) == len(first.swept) > 10
    assert {shape.stages[0] for shape in first.left} == {"EAGLE3_FC", "EAGLE3_PREFILL_FC"}  # whose plans fail
    again = run(only_missing=True)
    assert again.swept == () and len(again.left) == len(first.left) and again.table.entries == first.table.entries
    assert find_table("A GPU", H200, tmp_path, tmp_path / "none") is not None
    table("Another GPU").write(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="is a table of Another GPU, not of A GPU; name another file with --out"):
        run(out=tmp_path / "other.json")


TABLES = sorted(SHIPPED.glob("*.json"))


# pairs whose every launch has an entry in a GPU's shipped table, but for many chunks where the GPU does not know them
MANY_CHUNKS = {f"rows={128 * count}" for count in (6, 8, 12, 16)}
KNOW_MANY_CHUNKS = {"NVIDIA H200"}
# launches of such pairs that nobody has measured on a GPU: SmolLM2's attention in eight slots of more than 5,376
# positions
NOT_MEASURED = {"NVIDIA H100 80GB HBM3": re.compile(r"batch=\d query_tiles=\d group=3 kv_heads=3 .* split=512")}
MANY_SLOTS = (16, 32)  # of runtimes of which the H200's table has launches of Llama-8B's shape
COVERED = {
    "NVIDIA H200": ("llama-8b",),
    "NVIDIA H100 80GB HBM3": ("llama-8b", "qwen3-8b", "smollm2-135m"),
}


# pairs of which tables have launches of one of several ranks, too: ranks, and whether sums are those of any number
CUT = {
    (2, False): ("llama-8b", "gpt-oss-120b"),
    (2, True): ("llama-8b",),
    (4, False): ("llama-8b", "gpt-oss-120b", "llama-70b"),
}
PARALLEL_DRAFTS = ("peagle", "dflash", "dspark")


# entries are of powers of two of rows, which other depths add none to but three tiles of gpt-oss's query rows; tables
# know 16 chunks of a prompt at once, and all that are 120b's by default
FEW = Sizes(depths=(0, 1, 3, 7), max_prefill_chunks=16)
WHOLE = {"gpt-oss-120b": [Sizes(depths=(0, 1, 3, 4, 7))]}


def launches_of_pairs(gpu: Gpu, directory: Path) -> dict[str, list[Shape]]:
    names = [name for name in read_geometries() if name not in WITHOUT_ENTRIES]
    pairs = {name: random_pair(name, directory / name) for name in names}
    pairs["bundled"] = open_pair(DEMO / "target", DEMO / "head")
    eight = RuntimeConfig(quantize="fp8", quantize_lm_head=True, kv_cache_dtype="fp8")
    pairs["llama-8b in FP8"] = rounded_pair(pairs["llama-8b"], eight, "fp8")
    pairs["llama-8b in INT4"] = rounded_pair(pairs["llama-8b"], RuntimeConfig(quantize="int4"))
    sizes = {**TUNED_HYBRIDS, **WHOLE}  # the first are known for few slots alone
    for whole, kind in ROUNDED:
        name = f"{whole} in {kind}"
        pairs[name] = rounded_pair(pairs[whole], RuntimeConfig(quantize=kind))
        sizes[name] = [Sizes((1,), (0,))]
    pairs["with its MTP layer"] = random_pair("qwen3.6-35b-a3b", directory / "mtp", "mtp")
    sizes["with its MTP layer"] = [Sizes((1,), (0, 1), max_prefill_chunks=16)]
    for (size, invariant), cut in CUT.items():
        for whole in cut:
            name = f"{whole} of {size} GPUs{', invariant' * invariant}"
            options = RuntimeConfig(tensor_parallel_size=size, tp_invariant=invariant)
            pairs[name] = cut_pair(pairs[whole], options)
            if size == 4:
                sizes[name] = [Sizes((1,), (0, 3), max_prefill_chunks=16)]
    for method in PARALLEL_DRAFTS:
        name = f"llama-8b with {method}"
        pairs[name], sizes[name] = random_pair("llama-8b", directory / method, method), [Sizes((1,), (3, 5, 7))]
    pairs["llama-8b of many slots"] = pairs["llama-8b"]
    sizes["llama-8b of many slots"] = sizes_of(MANY_SLOTS, FEW)
    del pairs["llama-70b"]  # whole it has no entry that smaller ones lack
    del pairs["gemma-3-27b"]  # its vocabulary of 262,208 is above what kernels take
    return {name: listed([pair], "all", sizes.get(name, [FEW]), gpu) for name, pair in pairs.items()}


def test_shipped_tables_have_knobs_alone() -> None:
    """And say where they come from."""
    assert {read_table(path).gpu for path in TABLES} == COVERED.keys()
    for path in TABLES:
        written, found = check_table(path), read_table(path)
        assert path.name == file_name(found.gpu) and found.commit and found.driver and found.read_gb_s > 0
        assert found.is_of(H200)  # so both have the same launches and candidates
        for kind, entries in written.entries.items():
            for key, entry in entries.items():
                several = "weights=" in key or "shared_rows=" in key
                more = OF_CODES if kind == "decode_gemm" and several else set()
                assert {*entry.knobs} - more == KNOBS[kind], key
                is_timed = entry.default_us > 0  # else nobody timed the plan that is derived
                assert entry.stages and (not is_timed or 0 < entry.best_us <= entry.default_us), key


def has_many_chunks(shape: Shape) -> bool:
    return shape.key.split()[0] in MANY_CHUNKS


def is_known(shape: Shape, table: Any) -> bool:
    """Whether a table has an entry of a launch, which is one of its candidates."""
    knobs = table.find(*shape.place)
    assert knobs is None or any(dict(plan.knobs) == dict(knobs) for plan in shape.candidates), shape.place
    return knobs is not None


@pytest.mark.second
def test_shipped_tables_have_a_plan_of_every_launch_of_llama(tmp_path: Path) -> None:
    """The pair that all cover; `-m wide` looks at others."""
    launches = listed([random_pair("llama-8b", tmp_path)], "all", [FEW], H200)
    for path in TABLES:
        found = read_table(path)
        for shape in launches:
            many = has_many_chunks(shape) and found.gpu not in KNOW_MANY_CHUNKS
            assert is_known(shape, found) or many, f"{shape.place} has no entry"


@pytest.mark.wide
def test_shipped_tables_have_a_plan_of_every_launch_and_no_other(tmp_path: Path) -> None:
    """Of the pairs that they cover; and no entry is stale, as one that is no candidate's would count as none."""
    launches = launches_of_pairs(H200, tmp_path)
    for path in TABLES:
        found = read_table(path)
        left = {(kind, key) for kind, entries in found.entries.items() for key in entries}
        for name, shapes in launches.items():
            for shape in shapes:
                many = has_many_chunks(shape) and found.gpu not in KNOW_MANY_CHUNKS
                covered = name in COVERED[found.gpu] and not many
                if covered and found.gpu in NOT_MEASURED and NOT_MEASURED[found.gpu].fullmatch(shape.key):
                    assert not is_known(shape, found), f"{shape.place} of {name} is measured"
                else:
                    assert is_known(shape, found) or not covered, f"{shape.place} of {name} has no entry"
                left.discard(shape.place)
        assert not left, "entries of no launch"
