"""Executors of several ranks where a launcher that launches nothing stands for GPUs: memory, launches, failures."""

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowered import CPU, pretend_gpu
from prefill_cases import make_named

from lowlat.engine.memory import plan
from lowlat.engine.memory.held import held_memory
from lowlat.errors import ConfigError, DeviceError
from lowlat.executors import kernel_executor
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.distributed import parallel
from lowlat.executors.distributed.parts import place_parts
from lowlat.executors.distributed.peers import PeerMemory, peer_problem, planned_bytes
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.graph import GraphExecutor, check_call
from lowlat.executors.make import Rank, refuse_ranks
from lowlat.graphs import Bucket, Role
from lowlat.graphs.audit import OwnedMemory
from lowlat.graphs.replay import Replays
from lowlat.kernels.collectives.peers.words import HOST_GAVE_UP
from lowlat.kernels.toolchain.kernel import H200
from lowlat.models.rank_weights import rank_weights
from lowlat.models.shard import rank_configs
from lowlat.models.target import read_model_config
from lowlat.models.weight_plan import weight_plan
from lowlat.options.runtime import RuntimeConfig
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefills
from lowlat.step.variants import first_token_bucket
from lowlat.tools.bench.geometry import random_target, read_geometries
from lowlat.tools.gpus import describe_gpu
from lowlat.tools.precompile import kernels_of

BUCKET = Bucket(1, 1, 0)
BUCKETS = {Bucket(2, 1, 0): 0, Bucket(1, 4, 3): 3, first_token_bucket(0): 0}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors with kernels on a machine without a GPU."""
    pretend_gpu(monkeypatch, H200)


class Idle(kernel_executor.KernelExecutor):
    """An executor that issues nothing."""

    def _run(self, size: Any) -> None:
        raise AssertionError(f"{size} was run")


@pytest.mark.second
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["llama", "mxfp4"])
def test_ranks_launch_alike_over_memory_of_their_own_and_what_they_all_reduce_by(name: str, tmp_path: Path) -> None:
    """Audited: a launch points into its rank's memory or the peers'; commands are the first rank's alone."""
    pair, size = make_named(name, tmp_path), 2
    geometries = [replace(pair.geometry, config=config) for config in rank_configs(pair.geometry.config, size)]
    buckets = {bucket: depth for bucket, depth in BUCKETS.items() if depth in pair.topologies}
    steps = [{b: build_step(each, b, pair.topologies[depth]) for b, depth in buckets.items()} for each in geometries]
    prefills = [build_prefills(each) for each in geometries]
    rows = parallel.exchanged_rows([*steps[0].values(), *prefills[0].values()])
    peers, ranks = PeerMemory([CPU] * size, rows), list[Any]()
    for rank, each in enumerate(geometries):
        place = RankPlace(rank, peers, ranks[0] if ranks else None)
        weights = rank_weights(pair.source, each.config)
        ranks.append(Idle(steps[rank], prefills[rank], weights, CPU, kernel_executor.KernelOptions(place=place)))
    commands = [executor.state.of_role(Role.COMMAND) for executor in ranks]
    assert all(tensor.data_ptr() == commands[1][name].data_ptr() for name, tensor in commands[0].items())
    assert ranks[0].state["lengths"].data_ptr() != ranks[1].state["lengths"].data_ptr()
    every: list[Any] = [steps[0], prefills[0]]
    for programs in every:
        for key in programs:
            groups = [executor.groups(key) for executor in ranks]
            kinds = [[group.name for group in each] for each in groups]
            assert kinds[0] == kinds[1]
            names = [group.name for group in groups[0]]
            assert "sum_ranks" not in names
            ops = [op.kind for op in programs[key].ops]
            assert sum(each.startswith("all_reduce") for each in names) == ops.count("sum_ranks")
            launched = [call.kernel.name for group in groups[1] for call in group.kernel_calls]
            forwards = [place for place, each in enumerate(launched) if each.startswith("forward_commands")]
            assert len(forwards) == ops.count("apply_commands")
            assert all(launched[place + 1].startswith("begin_step") for place in forwards)
    for executor in ranks:
        owned = OwnedMemory(executor.owned())
        for key in (*every[0], *every[1]):
            for group in executor.groups(key):
                for call in group.calls:
                    check_call(owned, call)
    exchanged = next(group.calls[0] for group in ranks[0].groups(Bucket(2, 1, 0)) if group.name == "all_reduce")
    others = {area.data_ptr() for area in exchanged.arguments[-8:] if isinstance(area, torch.Tensor)}
    with pytest.raises(DeviceError, match="nobody owns"):
        check_call(OwnedMemory([each for each in ranks[0].owned() if each.data_ptr() not in others]), exchanged)
    for executor in ranks:
        executor.close()


def test_a_full_gpu_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each GPU by the part of the model that it gets; then what all hold is told by GPU."""
    pair = make_named("llama", tmp_path)
    configs = rank_configs(pair.geometry.config, 2)
    topology = pair.topologies[0]
    ranks = [
        Rank(config, {BUCKET: build_step(replace(pair.geometry, config=config), BUCKET, topology)}, {})
        for config in configs
    ]
    weights: Any = SimpleNamespace(shapes=lambda: pair.source, arena_bytes=0, made_bytes=0)
    gpus, choice = [torch.device("cuda", 0), torch.device("cuda", 1)], DeviceChoice(CPU, "reference", "a test")
    free = {"cpu": 1 << 40, "cuda:0": 1 << 40, "cuda:1": 1 << 40}
    monkeypatch.setattr(plan, "available_bytes", lambda device: free[str(device)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 1 << 41))
    plans = plan.plan_ranks(ranks, weights, choice, gpus)
    plan.check_ranks(plans, gpus)
    needs = [found.need for found in plans]
    first, second = (each.to_dict() for each in held_memory(needs, gpus))
    assert (first["device"], first["ranks"], second["device"], second["ranks"]) == ("cuda:0", [0], "cuda:1", [1])
    assert first["weights_bytes"] == needs[0].weights_bytes > 0 and first["free_bytes"] == 1 << 40
    (shared,) = (each.to_dict() for each in held_memory(needs, [CPU, CPU]))
    assert shared["ranks"] == [0, 1] and shared["kv_bytes"] == first["kv_bytes"] + second["kv_bytes"]
    free["cuda:1"] = needs[1].total_bytes - 1
    with pytest.raises(ConfigError, match=r"GiB are needed on cuda:1 .* lower max_batch, max_context"):
        plan.check_ranks(plans, gpus)


class StandIn:
    """An executor whose device fails, or never ends, when it is told to; its ring shows `published` steps."""

    residence = None

    def __init__(self, number: int, log: list[str]) -> None:
        self.device, self.state, self.counts = torch.device("cuda", number), dict[str, Any](), None
        self.number, self.log, self.failed, self.problem = number, log, False, ""
        self.look: Any = None
        self.published = 0

    def look_at_others(self, look: Any) -> None:
        self.look = look

    def idle(self) -> bool:
        if self.problem:
            self.failed = True
            raise DeviceError(f"{self.device} {self.problem}")
        return True

    def current(self) -> Any:
        return nullcontext()

    def write_state(self, values: Any) -> None:
        self.state |= values

    def step(self, bucket: Any) -> None:
        self.log.append(f"step {self.number}")

    def wait_published(self, count: int) -> None:
        if self.look is not None:
            self.look()
        elif self.published < count:
            self.idle()
            self.log.append(f"published {count} by {self.number}")

    def settle(self, until: float) -> None:
        self.log.append(f"settle {self.number}")

    def give_up(self) -> None:
        self.failed = True

    def stop_loop(self) -> None:
        self.log.append("stop")

    def close(self) -> None:
        self.log.append(f"close {self.number}")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("how", ["a device fails", "a rank gives up", "nothing"])
def test_what_one_rank_fails_by_all_end_by(how: str) -> None:
    log: list[str] = []
    peers = PeerMemory([CPU] * 2, {64: 1})
    peers.channel(0, 64)
    made: Any = lambda number, leader: StandIn(number, log)  # noqa: E731
    executor = parallel.ParallelExecutor(made, peers)
    assert int(peers.abort[0]) == 0
    executor.step(Bucket(1, 1, 0))
    assert log == ["step 0", "step 1"]
    if how == "nothing":
        executor.wait_published(1)
        executor.close()
        assert log[2:] == ["stop", "close 1", "close 0"]
        return
    if how == "a device fails":
        executor.ranks[1].problem = "is lost"  # type: ignore[attr-defined]
    else:
        peers.abort[0] = 1 | 2 << 8
    start = time.monotonic()
    with pytest.raises(DeviceError, match="cuda:1 is lost" if how == "a device fails" else r"rank 0 .* for rank 1"):
        executor.wait_published(1)
    assert time.monotonic() - start < 1.0
    assert int(peers.abort[0]) == (HOST_GAVE_UP if how == "a device fails" else 1 | 2 << 8)
    assert "settle 0" in log
    executor.close()
    assert {rank.failed for rank in executor.ranks} == {how == "a device fails"}


@pytest.mark.usefixtures("no_gpu")
def test_the_host_waits_for_every_rank_before_it_writes_for_what_follows() -> None:
    log: list[str] = []
    peers = PeerMemory([CPU] * 4, {64: 1})
    made: Any = lambda number, leader: StandIn(number, log)  # noqa: E731
    executor: Any = parallel.ParallelExecutor(made, peers)
    executor.ranks[2].published = 5
    executor.wait_for_ranks(5)
    assert log == ["published 5 by 1", "published 5 by 3"]
    executor.write_state({"draft_length_costs": 7})
    assert [rank.state for rank in executor.ranks] == [{"draft_length_costs": 7}] * 4
    executor.ranks[3].problem = "hangs: step 6"
    with pytest.raises(DeviceError, match="cuda:3 hangs: step 6"):
        executor.wait_for_ranks(6)
    assert int(peers.abort[0]) == HOST_GAVE_UP
    executor.close()


class Broken:
    """A graph whose device is lost."""

    def launch(self, stream: Any) -> None:
        raise DeviceError("a captured step cannot be launched: CUDA_ERROR_ILLEGAL_ADDRESS")


def test_a_launch_that_fails_names_its_device() -> None:
    lost: Any = object.__new__(GraphExecutor)
    lost.device, lost._core_stream, lost._failed = torch.device("cuda", 1), None, False
    lost._graphs = Replays(None)
    lost._graphs[BUCKET] = Broken()
    with pytest.raises(DeviceError, match=r"cuda:1 failed: .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        lost.step(BUCKET)
    assert lost.failed


def test_gpus_of_their_own_all_reduce_inside_of_kernels(tmp_path: Path) -> None:
    """GEMMs and MoE layers of a step, one launch for each; prompts by shares of their rows."""
    random_target(read_geometries()["tiny-experts"], tmp_path)
    options = RuntimeConfig(max_batch=1, max_context=256, tensor_parallel_size=2)
    names = kernels_of(tmp_path, None, options, describe_gpu("NVIDIA H200").facts)
    for part in (r"decode_gemm_all_reduce_ranks2_128x256", r"experts_mlp_.*_gpus2", r"share_rows_n128_ranks2"):
        assert any(re.match(part, name) for name in names), part
    assert not any(name.startswith(("all_reduce_add", "experts_gemm")) for name in names)


def test_each_gpu_is_sent_its_part_and_lets_go_of_it() -> None:
    """Whole tensors once, parts by rank; what is streamed is the caller's alone, two names of one tensor together."""
    target = read_model_config(Path("lowlat/demo/target"), dtype="bfloat16")
    config, hidden = rank_configs(target, 2), target.hidden_size
    plan = {name: shape for name, (shape, _) in weight_plan(target).items() if "layers" not in name}
    whole = {name: torch.randn(shape) for name, shape in plan.items()}
    whole["embed.weight"] = whole["lm_head.weight"] = torch.randn(target.vocab_size, hidden)
    whole["layers.0.o.weight"] = torch.randn(hidden, target.attention.query_size)
    placed = place_parts(whole, config, [CPU, CPU])
    for rank, part in enumerate(placed):
        expected = rank_weights(whole, config[rank])
        assert {name: tensor.shape for name, tensor in part.shapes().items()} == {
            name: tensor.shape for name, tensor in expected.items()
        }
        for names, tensor in part.stream():
            assert all(torch.equal(tensor, expected[name]) for name in names)
            assert all(tensor.data_ptr() != given.data_ptr() for given in whole.values())
        assert not list(part.stream())


def test_what_ranks_all_reduce_by_is_planned(no_gpu: None) -> None:
    """At least what a rank's launches ask for, and not much more."""
    peers = PeerMemory([torch.device("meta", rank) for rank in range(2)], {64: 300, 160: 4})
    for width in (64, 160):
        peers.channel(0, width)
    for kind in ("gemm", "moe"):
        peers.rows(0, 64, kind)
    peers.shares(0, 64)
    assert peers.num_bytes(0) <= planned_bytes(2, {64: 300, 160: 4}, {64: 300}) + 8192
    assert peers.num_bytes(0) > 0.9 * planned_bytes(2, {64: 300, 160: 4}, {64: 300})


def test_what_kernels_cannot_do_is_refused() -> None:
    eager = DeviceChoice(torch.device("cuda", 0), "eager", "asked for")
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 runs with executor 'graph'"):
        refuse_ranks(RuntimeConfig(tensor_parallel_size=2), eager)


def test_gpus_that_do_not_reach_each_other_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    fine = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuInit", lambda flags: (fine,))
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (fine, 2))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda gpu: (fine, gpu))
    monkeypatch.setattr(driver, "cuDeviceCanAccessPeer", lambda gpu, other: (fine, int(gpu < other)))
    gpus = [torch.device("cuda", gpu) for gpu in range(3)]
    assert peer_problem([CPU, CPU]) is None
    assert peer_problem([gpus[0], gpus[0]]) is None
    assert str(peer_problem(gpus)).startswith("there is no cuda:2: 2 GPUs are visible")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 .* cuda:1 cannot reach .* cuda:0; `nvidia-smi topo"):
        PeerMemory(gpus[:2], {64: 1})
