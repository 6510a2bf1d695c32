"""Tuning and strict mode where a target is cut for several GPUs: launches of ranks, their memory on one GPU, and that
a runtime of all ranks has an entry for each.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import answer, lowlat, refusal
from lowered import CPU, pretend_gpu
from stages import later, wide
from tiny_models import PairPaths, make_target, random_draft_model

from lowlat.engine.loading import loading
from lowlat.engine.loading.strict import tune_command
from lowlat.errors import ConfigError
from lowlat.executors import LaunchCounts
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.distributed.parallel import ParallelExecutor, exchanged_rows
from lowlat.executors.distributed.parts import place_parts
from lowlat.executors.distributed.peers import PeerMemory
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.kernel_executor import KernelExecutor, KernelOptions
from lowlat.executors.planned import META
from lowlat.kernels.collectives.peers.rows import PeerRows, area_shape
from lowlat.kernels.toolchain.kernel import H200, KernelCall
from lowlat.kernels.tuning.table import Entry, TuningTable
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.tools.planned_step import target_config
from lowlat.tools.tune.arguments import Places
from lowlat.tools.tune.loopback import LoopedMemory, looped
from lowlat.tools.tune.pairs import Pair, Sizes, cut_pair, every_part, open_pair, random_pair
from lowlat.tools.tune.run import kinds_of, listed
from lowlat.tools.tune.shapes import Shape, calls_by_plan, collect

# heads of 2 groups, 13 steps of the inner width: parts of two ranks are 7 and 6 steps
SMALL: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256, "intermediate_size": 832,
    "vocab_size": 512,
}  # fmt: skip
OF_DRAFT = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
ROWS: dict[str, Any] = {"prefill_chunk": 64, "max_prefill_chunks": 2}
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 256, "dtype": "bfloat16", **ROWS}
LOADED = Sizes((1, 2), **ROWS)  # of the batches that `load` asks for
H100 = "NVIDIA H100 80GB HBM3"
FEW = ("--geometry", "tiny-experts", "--batch", 1, "-S", 0, "--max-prefill-chunks", 1, "--tensor-parallel", 2)
BOTH = pytest.mark.parametrize("invariant", [False, later(True)], ids=["", "invariant"])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    folder = tmp_path_factory.mktemp("ranks")
    found = PairPaths(folder / "target", folder / "head")
    target = make_target(found.target, "llama", num_hidden_layers=4, **SMALL)
    random_draft_model(found.head, target, draft_vocab_size=160, **{k: v for k, v in SMALL.items() if k in OF_DRAFT})
    return found


def cut(paths: PairPaths, size: int, *, invariant: bool = False, draft: int | None = None) -> Pair:
    options = RuntimeConfig(tensor_parallel_size=size, tp_invariant=invariant)
    return cut_pair(open_pair(paths.target, paths.head, "bfloat16"), options, draft)


def tensors(calls: tuple[KernelCall, ...]) -> list[torch.Tensor]:
    return [each for call in calls for each in call.arguments if isinstance(each, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.second
@BOTH
def test_a_rank_s_launches_are_keyed_apart_from_a_whole_model_s(invariant: bool, paths: PairPaths) -> None:
    """Where they add up over GPUs, or in parts; all others are launches that a model of such sizes would have."""
    whole, ranks = listed([cut(paths, 1)], "all", [Sizes((1, 2), (0, 3), **ROWS)]), dict[str, Shape]()
    for shape in listed([cut(paths, 2, invariant=invariant)], "all", [Sizes((1, 2), (0, 3), **ROWS)]):
        ranks[f"{shape.kind} {shape.key}"] = shape
    assert not any(re.search(r"epilogue=all_reduce|gpus=|parts=", shape.key) for shape in whole)
    for key, shape in ranks.items():
        assert ("epilogue=all_reduce" in key) == ("gpus=2" in key)
        assert len(shape.candidates) > 1
    exchanged = {stage for key, shape in ranks.items() if "gpus=2" in key for stage in shape.stages}
    assert exchanged == {"BASE_O", "BASE_FFN_DOWN", "EAGLE3_O", "EAGLE3_FFN_DOWN"}
    down = {match[1] for key in ranks if (match := re.search(r"N=256 K=(\d+) epilogue=all_reduce", key))}
    assert down == {"256", *(("448", "384") if invariant else ("416",))}
    assert all(("parts=4" in key) == invariant for key in ranks if "gpus=2" in key)
    assert all(("parts=" in key) == invariant for key in ranks if "prefill_gemm" in key)
    alone = listed([cut(paths, 2, draft=1)], "gemm", [Sizes((1,), (3,), **ROWS)])
    assert {stage for s in alone if "gpus=2" in s.key for stage in s.stages} == {"BASE_O", "BASE_FFN_DOWN"}


def test_ranks_of_other_extents_are_lowered_and_others_are_not(paths: PairPaths, tmp_path: Path) -> None:
    sizes = Sizes((1,), (0,), **ROWS)
    assert len(every_part(cut(paths, 1), H200, sizes)) == len(every_part(cut(paths, 2), H200, sizes)) == 1
    uneven = every_part(cut(paths, 2, invariant=True), H200, sizes)
    assert [part.abort is None for part in uneven] == [False, False]
    with pytest.raises(ConfigError, match="the target cannot be cut: tensor_parallel_size 8"):
        every_part(cut_pair(random_pair("smollm2-135m", tmp_path), RuntimeConfig(tensor_parallel_size=8)), H200, sizes)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 2), (8, 7)])
def test_what_a_rank_sends_lies_where_it_awaits_its_peers(ranks: int, rank: int) -> None:
    """And nowhere else: not where it counts, and not beyond its own area."""
    rows, width = 3, 16
    areas = tuple(torch.zeros(area_shape(ranks, rows, width), dtype=torch.int64) for _ in range(ranks))
    found = looped(PeerRows(rank, areas, torch.zeros(1, dtype=torch.int64)))
    own, peers = found.areas[rank], [peer for peer in range(ranks) if peer != rank]
    assert (found.rank, found.size, found.rows, found.width) == (rank, ranks, rows, width)
    for slot in range(2):
        for peer in peers:
            found.areas[peer][slot, rank] = 1 + slot * ranks + peer
    for slot in range(2):
        assert all((own[slot, peer] == 1 + slot * ranks + peer).all() for peer in peers)
        assert not own[slot, rank].any()
    assert own.untyped_storage().nbytes() // 8 == own.numel() + 2 * (ranks - 1) * rows * width
    everything = own.as_strided((own.untyped_storage().nbytes() // 8,), (1,), 0)
    assert int(everything.count_nonzero()) == int(own.count_nonzero())


@BOTH
def test_no_timed_launch_points_into_memory_of_others(invariant: bool, paths: PairPaths) -> None:
    """Exchanges of launches that are timed come back; others wait for ranks that are not there, and are none of them.
    On a GPU they lie as they did without memory, and begin with zeros."""
    for part in every_part(cut(paths, 2, invariant=invariant), H200, Sizes((1, 2), (0, 3), **ROWS)):
        shapes = collect([part], H200, kinds_of("all"))
        calls, waited = calls_by_plan(shapes, H200, 2), 0
        assert part.abort is not None and part._place is not None
        others = {storage(each) for each in part._place.peers.tensors()} - {storage(part.abort)}
        for shape in shapes:
            for variant in calls[shape.place]:
                assert not {storage(each) for each in tensors(variant)} & others
            if "gpus=2" not in shape.key:
                continue
            waited += 1
            places = Places(CPU, part.weights.tensors(), part.weight_bytes)
            assert not places.read(part.abort).any()
            for variant in calls[shape.place]:
                (call,) = places.place(variant, 0)
                first, second = (each for each in tensors((call,)) if each.dim() == 4 and each.dtype == torch.int64)
                rows, width = first.shape[2:]
                assert second.data_ptr() - first.data_ptr() == rows * width * 8 and not first.any()
            next(each for each in tensors((call,)) if each.shape == (1,)).fill_(2)
            assert places.read(part.abort).tolist() == [2]
        assert waited


def test_memory_that_comes_back_is_kept_and_is_each_rank_s_own() -> None:
    peers = LoopedMemory([torch.device(META.type, rank) for rank in range(2)], {64: 100})
    first, second = peers.rows(0, 64, "gemm"), peers.rows(1, 64, "gemm")
    assert peers.rows(0, 64, "gemm") is first and storage(first.areas[0]) == storage(first.areas[1])
    assert storage(first.areas[0]) != storage(second.areas[0])
    assert first.rows == 64
    with pytest.raises(ConfigError, match="not of 72"):
        peers.rows(0, 72, "gemm")


class Standing(KernelExecutor):
    """An executor of one rank that launches nothing."""

    def _run(self, size: Any) -> None:
        raise AssertionError(f"{size} was run")

    def stop_loop(self) -> None:
        """There is no loop."""


def stand_in(choice: Any, ranks: Any, weights: Any, *_: Any, **__: Any) -> Any:
    """As `make_executor` makes one for GPUs of their own, of executors that launch nothing."""
    programs, prefills = ranks[0].programs, ranks[0].prefills
    if len(ranks) == 1:
        return Standing(programs, prefills, weights, CPU)
    devices = [torch.device("cpu", number) for number in range(len(ranks))]
    peers = PeerMemory(devices, exchanged_rows([*programs.values(), *prefills.values()]))
    parts = place_parts(weights, [rank.config for rank in ranks], [CPU] * len(ranks))

    def make(number: int, leader: Any) -> Any:
        options = KernelOptions(place=RankPlace(number, peers, leader))
        return Standing(ranks[number].programs, ranks[number].prefills, parts[number], CPU, options)

    return ParallelExecutor(make, peers)


@pytest.fixture
def load(paths: PairPaths, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchCounts]:
    """Load the pair in strict mode as on GPUs of their own, with entries by kind and key; answer with the counts."""
    monkeypatch.setattr(loading, "choose_device", lambda *_: DeviceChoice(CPU, "graph", "a test"))
    monkeypatch.setattr(loading, "rank_devices", lambda choice, size, named: [CPU] * size)
    monkeypatch.setattr(loading, "make_executor", stand_in)

    def loaded(entries: Mapping[str, Mapping[str, Entry]], **options: Any) -> LaunchCounts:
        table = TuningTable("a GPU", H200.capability, H200.num_multiprocessors, H200.shared_bytes, entries=entries)
        pretend_gpu(monkeypatch, replace(H200, tuning=table))
        given = RuntimeConfig(**{**OPTIONS, "perf_mode": "strict", **options})
        found = loading.load(paths.target, SpeculativeConfig(model=paths.head, num_speculative_tokens=3), given)
        counts = found.executor.counts
        found.close()
        return counts

    return loaded


@pytest.mark.parametrize("invariant", [wide(False), wide(True)], ids=["", "invariant"])
def test_strict_mode_takes_ranks_whose_launches_all_have_entries(
    invariant: bool, paths: PairPaths, load: Callable[..., LaunchCounts]
) -> None:
    """Those that `lowlat tune` lists for the pair; where one lacks, of the second rank alone, it is named."""
    options = {"tensor_parallel_size": 2, "tp_invariant": invariant}
    entries: dict[str, dict[str, Entry]] = {}
    for shape in listed([cut(paths, 2, invariant=invariant)], "all", [LOADED]):
        entries.setdefault(shape.kind, {})[shape.key] = Entry(shape.candidates[-1].knobs)
    counts = load(entries, **options)
    assert 0 < counts.planned == counts.tuned < counts.launches and not counts.untuned
    second = "K=384" if invariant else "K=416"
    (key,) = [key for key in entries["decode_gemm"] if key.startswith(f"rows=2 N=256 {second} epilogue=all_reduce")]
    del entries["decode_gemm"][key]
    command = f"lowlat tune all --model DIR --draft-model DIR --tensor-parallel 2{' --tp-invariant' * invariant}"
    with pytest.raises(ConfigError) as refused:
        load(entries, **options)
    assert (
        f"for this GPU: decode_gemm {key}; `{command} --prefill-chunk 64 --max-prefill-chunks 2 --missing` measures"
        in str(refused.value)
    )
    lacking = load(entries, **options, perf_mode="default", prompt_logprobs=False)  # as strict mode has it
    assert lacking.untuned == (("decode_gemm", key),) and lacking.planned - lacking.tuned > 0


@pytest.mark.wide
def test_strict_mode_refuses_ranks_by_the_entries_of_a_whole_model(
    paths: PairPaths, load: Callable[..., LaunchCounts]
) -> None:
    entries: dict[str, dict[str, Entry]] = {}
    for shape in listed([cut(paths, 1)], "all", [LOADED]):
        entries.setdefault(shape.kind, {})[shape.key] = Entry(shape.candidates[0].knobs)
    assert load(entries).untuned == ()
    with pytest.raises(ConfigError, match=r"decode_gemm rows=\d.*, \d+ more; `lowlat tune .* --tensor-parallel 2 "):
        load(entries, tensor_parallel_size=2)


def test_counts_of_ranks_are_added_up() -> None:
    one = LaunchCounts(5, 3, 2, 1, (("a", "b"),), ("linear in x",), 1, 2)
    both = LaunchCounts.of_ranks([one, LaunchCounts(5, 3, 1, 1, (("a", "b"), ("a", "c")), (), 1, 0)])
    assert (both.launches, both.planned, both.tuned, both.library_calls) == (10, 6, 3, 2)
    assert both.untuned == (("a", "b"), ("a", "c")) and both.fallbacks == ("linear in x",)
    assert (both.synchronisations, both.copies) == (2, 2)


def test_the_command_that_tunes_has_the_options_that_say_which_launches_there_are() -> None:
    target = target_config(Path("llama-8b"))
    plain = tune_command(RuntimeConfig(), target)
    assert plain == "lowlat tune all --model DIR --missing"
    options = RuntimeConfig(
        tensor_parallel_size=4, tp_invariant=True, quantize="fp8", quantize_lm_head=True, max_prefill_chunks=32,
        max_context=8192,
    )  # fmt: skip
    assert (
        tune_command(RuntimeConfig(max_context=600), target)
        == "lowlat tune all --model DIR --max-prefill-chunks 5 --missing"
    )
    assert tune_command(RuntimeConfig(max_batch=8), target) == plain
    assert tune_command(RuntimeConfig(max_batch=6), target) == "lowlat tune all --model DIR --batch 6 --missing"
    assert tune_command(RuntimeConfig(max_batch=32), target) == "lowlat tune all --model DIR --batch 32 --missing"
    forced, texts = RuntimeConfig(forced_rows=16), SpeculativeConfig(model="head", text_drafts="suffix", wide_rows=32)
    assert tune_command(forced, target) == "lowlat tune all --model DIR --forced-rows 16 --missing"
    assert tune_command(forced, target, texts).endswith("--forced-rows 32 --missing")
    suffix = tune_command(RuntimeConfig(), target, SpeculativeConfig(method="suffix"))
    assert suffix == "lowlat tune all --model DIR --method suffix --missing"
    assert "--method mtp" in tune_command(RuntimeConfig(), target, SpeculativeConfig(method="auto"))
    drafts = SpeculativeConfig(model="head", draft_tensor_parallel_size=1, draft_quantize="fp8")
    found = tune_command(options, target, drafts)
    for flag in (
        *("--draft-model DIR", "--quantize fp8", "--quantize-lm-head", "--tensor-parallel 4", "--tp-invariant"),
        *("--max-prefill-chunks 32", "--draft-quantize fp8", "--draft-tensor-parallel-size 1"),
    ):
        assert flag in found
    given = found.replace("--model DIR --draft-model DIR", "--list").removesuffix(" --missing").split()[1:]
    assert "cannot be cut" in refusal(*given, "--geometry", "smollm2-135m")


@pytest.mark.parametrize(
    ("name", "options", "flags"),
    [
        ("gpt-oss-120b", {"max_context": 8192}, ""),
        ("gpt-oss-120b", {"max_context": 8192, "max_prefill_chunks": 64}, ""),
        ("gpt-oss-120b", {"max_context": 32768, "prefill_chunk": 256}, " --prefill-chunk 256"),
        ("gpt-oss-120b", {"max_context": 8191}, ""),
        ("gpt-oss-120b", {"max_context": 2048}, " --max-prefill-chunks 16"),
        ("gpt-oss-120b", {"max_context": 8192, "max_prefill_chunks": 16}, " --max-prefill-chunks 16"),
        ("qwen3-30b-a3b", {"max_context": 32768}, ""),
        ("qwen3-30b-a3b", {"max_context": 32768, "max_prefill_chunks": 64}, " --max-prefill-chunks 64"),
        ("gpt-oss-20b", {"max_context": 32768}, ""),
        ("gpt-oss-20b", {"prompt_logits": True, "prefix_reuse": False}, " --max-prefill-chunks 1"),
    ],
)
def test_the_command_names_chunks_at_once_where_the_target_s_own_are_others(
    name: str, options: dict[str, Any], flags: str
) -> None:
    found = tune_command(RuntimeConfig(**options), target_config(Path(name)))
    assert found == f"lowlat tune all --model DIR{flags} --missing"


def test_steps_that_verify_drafts_from_text_are_listed(paths: PairPaths) -> None:
    """Without a draft model, and with the rows that they have with one."""
    pairs = (
        open_pair(paths.target, None, "bfloat16"),
        open_pair(paths.target, None, "bfloat16", method="suffix"),
        open_pair(paths.target, paths.head, "bfloat16"),
    )
    found = [listed([pair], "gemm", [Sizes((1,), (0, 3))]) for pair in pairs]
    plain, texts, drafts = ({each.key for each in shapes if "BASE_O" in each.stages} for shapes in found)
    assert plain < texts == drafts
    assert "tells its own" in refusal(
        *("tune", "--list", "--model", paths.target, "--draft-model", paths.head, "--method", "ngram")
    )


def test_the_command_lists_launches_of_ranks() -> None:
    found = answer("tune", "experts", "--list", *FEW, "--json")["shapes"]
    assert {each["kind"] for each in found} == {"experts_mlp", "experts_grouped"}
    assert all("gpus=2" in each["key"] for each in found if each["kind"] == "experts_mlp")
    assert "tensor_parallel_size must be 1, 2, 4 or 8, got 3" in refusal("tune", "--list", "--tensor-parallel", 3)
    assert "for one of them" in refusal("tune", "--list", "--compile")


def test_the_command_lists_the_launches_that_have_no_entry(tmp_path: Path) -> None:
    options = ("tune", "gemm", "--list", "--geometry", "llama-8b", "--batch", 1, "-S", 0)
    whole = answer(*options, "--json")
    known = answer(*options, "--missing", "--json")
    assert known["shapes"] == [] and known["num_launches"] == len(whole["shapes"]) > 10  # all of them are shipped
    shown = " ".join(lowlat(*options, "--missing").output.split())
    assert f"0 of {known['num_launches']} launches of llama-8b have no entry in the tables of an NVIDIA H200" in shown
    none = answer(*options, "--missing", "--out", tmp_path / "none.json", "--json")
    assert none["shapes"] == whole["shapes"]
    elsewhere = answer(*options, "--missing", "--kv-cache-dtype", "fp8", "--quantize", "fp8", "--json", "--card", H100)
    assert elsewhere["card"] == H100 and 0 < len(elsewhere["shapes"]) < elsewhere["num_launches"]
    assert all("weights=fp8" in each["key"] for each in elsewhere["shapes"])
    assert "is not described; there are" in refusal(*options, "--card", "A GPU")


@pytest.mark.wide
def test_the_command_compiles_what_it_would_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLAT_KERNEL_CACHE", str(tmp_path / "kernels"))
    given = ("tune", "gemm", "--compile", *FEW, "--candidates", 1)
    done = answer(*given, "--json")
    assert done["kernels"] == done["compiled"] == len(list((tmp_path / "kernels").iterdir())) > 0
    assert ", 0 of them compiled now" in lowlat(*given).output
    found = answer("tune", "gemm", "--list", *FEW, "--json")["shapes"]
    assert done["launches"] == len(found) > 1
    first, entries = found[0], dict[str, dict[str, Entry]]()
    entries[first["kind"]] = {first["key"]: Entry(first["plans"][0])}
    known = TuningTable("NVIDIA H200", H200.capability, H200.num_multiprocessors, H200.shared_bytes, entries=entries)
    known.write(tmp_path / "table.json")
    left = answer(*given, "--missing", "--out", tmp_path / "table.json", "--json")
    assert (left["launches"], left["compiled"]) == (done["launches"] - 1, 0)
