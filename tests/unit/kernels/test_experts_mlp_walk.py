"""A mixture of experts in one launch, walked thread by thread on a CPU, all blocks side by side."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_inventory import B200, GPUS
from kernel_walk import Walker, walkable
from moe_cases import exact_shares, make_logits, make_moe, want_routing
from moe_walk import NAMES, small_gpu, walk
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.rows import PeerRows, area_shape
from lowlat.kernels.common.sentinels import MISSING
from lowlat.kernels.formats import BF16, MXFP4
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.moe.decode.mlp_plan import plan_mlp
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape, plan_experts, rows_a_launch, warps_of
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.tools.tune.loopback import looped

pytestmark = pytest.mark.second


@pytest.mark.parametrize(
    ("late", "kind", "rows", "top_k", "quantised", "hidden", "inner", "blocks"),
    [
        (True, "random", 1, 2, True, 288, 96, 3),
        wide(False, "random", 3, 2, True, 96, 160, 2),
        (True, "shared", 5, 2, True, 64, 64, 4),
        (False, "ties", 9, 1, False, 96, 32, 1),
        (False, "none", 2, 2, True, 64, 32, 2),
    ],
)
def test_it_is_the_reference_s(
    late: bool, kind: str, rows: int, top_k: int, quantised: bool, hidden: int, inner: int, blocks: int
) -> None:
    """The kernel gives the right routing, activations, products and sums, also with warps of one product alone."""
    moe, walker = make_moe(5, hidden, inner, quantised=quantised), Walker(late)
    found = moe.arguments(moe.rows(rows), top_k)
    logits = make_logits("random" if kind == "none" else kind, rows, 5)
    live = ((torch.arange(rows) % 3 != 1) & (kind != "none")).to(torch.uint8).view(1, rows)
    routing = TopKRouting(logits, live)
    walk(walker, found, routing, blocks, early=late)
    wanted, about = want_routing(routing, top_k)
    assert torch.equal(found["expert_ids"], wanted)
    torch.testing.assert_close(found["expert_weights"], about, rtol=1e-5, atol=1e-7)
    moe.check(found)
    ids, step = wanted[wanted >= 0], 544 if quantised else 2048
    units = sum(-(-int((ids == each).sum()) // 8) for each in ids.unique())
    parts = -(-hidden // 64) * -(-2 * inner // 16) + -(-inner // 64) * -(-hidden // 16)
    assert walker.bytes_copied == units * parts * step


@pytest.mark.parametrize(
    ("rows", "top_k", "count", "quantised", "over_all"),
    [
        (4, 9, 12, False, False),  # more pairs than a warp has lanes
        wide(2, 3, 5, "int4_64_zeros", True),
    ],
)
def test_every_row_takes_a_shared_expert_too(
    rows: int, top_k: int, count: int, quantised: bool | str, over_all: bool
) -> None:
    """The last expert, as the last of a row's, with the sigmoid of its logit as its share; no biases."""
    moe, logits = make_moe(count, 64, 64, quantised=quantised, biased=False), make_logits("random", rows, count)
    found, routing = moe.arguments(moe.rows(rows), top_k), TopKRouting(logits, over_all=over_all, shared=True)
    walk(Walker(True), found, routing, 3, early=True, plan=moe.plan(rows, top_k, small_gpu(3), warps=2))
    wanted, about = want_routing(routing, top_k)
    assert torch.equal(found["expert_ids"], wanted) and bool((wanted[:, -1] == count - 1).all())
    torch.testing.assert_close(found["expert_weights"], about, rtol=1e-5, atol=1e-7)
    moe.check(found)


def test_a_thread_may_have_several_pairs() -> None:
    """With the bits of a launch whose threads are more than its pairs can be."""
    rows, top_k = 12, 4
    moe, logits = make_moe(6, 64, 32, quantised=False), make_logits("random", rows, 6)
    found = [moe.arguments(moe.rows(rows), top_k) for _ in range(2)]
    found[1] |= {name: found[0][name] for name in ("x", "residual")}
    usual = moe.plan(rows, top_k, small_gpu(3), warps=2)
    longer = moe.plan(rows, top_k, small_gpu(3), warps=2, finishing=1, capacity=128)
    assert usual.whole.turns == 1 and longer.whole.turns == 2
    for given, plan in zip(found, (usual, longer), strict=True):
        walk(Walker(True), given, TopKRouting(logits), 3, early=True, plan=plan)
    moe.check(found[0])
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("expert_ids", "partials", "total"))


@pytest.mark.parametrize("blocks", [2, 5])  # runs begin and end within units, at odd tiles too
def test_tiles_in_pairs_have_the_bits_of_one_after_the_other(blocks: int) -> None:
    """Where a warp has all of a tile's steps, so that one copy has their scales."""
    rows, top_k = 3, 2
    moe, logits = make_moe(5, 128, 64), make_logits("random", rows, 5)
    found = [moe.arguments(moe.rows(rows), top_k) for _ in range(2)]
    found[1] |= {name: found[0][name] for name in ("x", "residual")}
    pairs = moe.plan(rows, top_k, small_gpu(blocks), warps=1)
    single = moe.plan(rows, top_k, small_gpu(blocks), warps=1, together=1)
    assert pairs.up_plan.is_even(pairs.up) and (pairs.up_plan.together, single.up_plan.together) == (2, 1)
    for given, plan in zip(found, (pairs, single), strict=True):
        walk(Walker(True), given, TopKRouting(logits), blocks, early=True, plan=plan)
    moe.check(found[0])
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("activated", "partials", "total"))


@pytest.mark.wide
def test_gpus_add_up_their_parts_of_every_expert() -> None:
    """Two GPUs with other weights and the same choice, twice: each has the sum of both, by its own partials' bits."""
    rows, top_k, gpus, hidden = 3, 2, 2, 72
    logits, residual = make_logits("random", rows, 5), torch.randn(rows, hidden).bfloat16()
    areas = tuple(torch.zeros(area_shape(gpus, rows, hidden), dtype=torch.int64) for _ in range(gpus))
    abort, walker = torch.zeros(1, dtype=torch.int64), Walker()
    found: list[list[dict[str, Any]]] = [[], []]
    with walkable(walker, *NAMES) as modules:
        streams: list[list[Any]] = [[], []]
        for gpu in range(gpus):
            peers = modules[-1].PeerRows(gpu, areas, abort)
            for _ in range(2):
                moe = make_moe(5, hidden, 32)
                given = moe.arguments(moe.rows(rows), top_k) | {"residual": residual}
                found[gpu].append(given)
                routing = TopKRouting(logits)
                streams[gpu] += modules[-1].experts_mlp(routing=routing, gpu=small_gpu(2), peers=peers, **given)
        walker.run(*streams[0], beside=streams[1:])
    for one, other in zip(*found, strict=True):
        sums = [(given["partials"][:, 0] + given["partials"][:, 1]) for given in (one, other)]
        expected = (residual.float() + (sums[0] + sums[1])).bfloat16()
        assert bool(expected.isfinite().all())
        assert torch.equal(one["total"], expected) and torch.equal(other["total"], expected)


@pytest.mark.wide
def test_a_gpu_whose_sums_come_back_to_it_waits_for_nobody() -> None:
    """As a rank's MoE layer is timed on a GPU of its own, launch after launch."""
    rows, top_k, gpus, hidden = 3, 2, 2, 72
    logits, residual = make_logits("random", rows, 5), torch.randn(rows, hidden).bfloat16()
    areas = tuple(torch.zeros(area_shape(gpus, rows, hidden), dtype=torch.int64) for _ in range(gpus))
    abort, walker = torch.zeros(1, dtype=torch.int64), Walker()
    with walkable(walker, *NAMES) as modules:
        peers = looped(PeerRows(1, areas, abort))
        for _ in range(3):
            moe = make_moe(5, hidden, 32)
            given = moe.arguments(moe.rows(rows), top_k) | {"residual": residual}
            walker.run(*modules[-1].experts_mlp(routing=TopKRouting(logits), gpu=small_gpu(2), peers=peers, **given))
            own = given["partials"][:, 0] + given["partials"][:, 1]
            assert torch.equal(given["total"], (residual.float() + (own + own)).bfloat16())
    assert int(abort[0]) == 0


@pytest.mark.parametrize("name", ["fp8", wide("int4_32_zeros")])
@pytest.mark.wide
def test_experts_of_dense_formats_without_biases(name: str) -> None:
    """Plain SwiGLU, scales of rows and of groups; shares of the softmax over all experts."""
    moe, logits = make_moe(5, 192, 64, quantised=name, biased=False), make_logits("random", 2, 5)
    found = moe.arguments(moe.rows(2), 2)
    walk(Walker(True), found, TopKRouting(logits, over_all=True), 2, early=True)
    shares, chosen = logits.softmax(1).topk(2)
    assert torch.equal(found["expert_ids"], chosen.int())
    torch.testing.assert_close(found["expert_weights"], shares, rtol=1e-5, atol=1e-7)
    moe.check(found)


@pytest.mark.parametrize(
    ("kind", "rows", "top_k", "count", "flagged"),
    [
        ("random", 1, 4, 37, False),
        ("odd", 2, 8, 70, False),
        ("ties", 5, 3, 33, True),
        ("none", 2, 3, 4, True),
    ],
)
def test_rows_choose_as_the_reference_does(kind: str, rows: int, top_k: int, count: int, flagged: bool) -> None:
    """Ids and shares are the promised ones; flags of two dimensions, rows listed by one warp and by all."""
    moe, live = make_moe(count, 64, 32), None
    found = moe.arguments(moe.rows(rows), top_k)
    logits = make_logits("random" if kind == "none" else kind, rows, count)
    if flagged:
        live = ((torch.arange(rows) % 3 != 1) & (kind != "none")).to(torch.uint8).view(1, rows)
    routing = TopKRouting(logits, live)
    walk(Walker(), found, routing, 2, plan=moe.plan(rows, top_k, small_gpu(2), warps=2))
    wanted, about = want_routing(routing, top_k)
    assert torch.equal(found["expert_ids"], wanted)
    exact = exact_shares(logits, wanted)
    torch.testing.assert_close(found["expert_weights"], exact, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found["expert_weights"], about, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.wide
def test_equal_logits_go_to_the_lowest_ids_and_what_is_not_finite_stays_in_its_row() -> None:
    plain = [-1.0, 0.0, -0.0, 2.0, 0.0, -0.0, 0.0, -3.0, 0.0]
    logits = torch.tensor([plain] * 4)
    logits[1, 5], logits[2, 2], logits[2, 5], logits[3, 2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    moe = make_moe(9, 64, 32)
    found, plan = moe.arguments(moe.rows(4), 8), moe.plan(4, 8, small_gpu(2), warps=2)
    walk(Walker(), found, TopKRouting(logits), 2, plan=plan)
    ids, shares = found["expert_ids"], found["expert_weights"]
    assert ids[0].tolist() == [3, 1, 2, 4, 5, 6, 8, 0]
    assert ids[1].tolist() == [5, 3, 1, 2, 4, 6, 8, 0]
    assert ids[2].tolist() == [2, 3, 1, 4, 6, 8, 0, 7]
    assert ids[3].tolist() == [3, 1, 4, 5, 6, 8, 0, 7]
    assert shares[1].isnan().all() and shares[2].isnan().all()
    assert shares[[0, 3]].isfinite().all()
    assert found["total"][[1, 2]].isnan().all() and found["total"][[0, 3]].isfinite().all()
    logits[3, 7] = -torch.inf
    found = moe.arguments(moe.rows(4), 8)
    walk(Walker(), found, TopKRouting(logits), 2, plan=plan)
    assert found["expert_ids"][3].tolist() == [3, 1, 4, 5, 6, 8, 0, 2] and found["expert_weights"][3, 7] == 0


def router_of(modules: list[ModuleType], **arguments: Any) -> Any:
    """In the place of a router's call: it lets the next kernel start, waits, fills what is awaited, and gives a layer's
    rows and logits, a word at a time."""
    ptx, cuda = modules[-1].ptx, modules[-1].cuda

    def router(x: int, normed: int, x_words: int, source: int, logits: int, words: int, *awaited: int) -> None:
        ptx.let_next_kernel_start()
        ptx.wait_for_previous_kernel()
        place, step = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.gridDim.x * cuda.blockDim.x
        for address, chunks in zip(awaited[::2], awaited[1::2], strict=True):
            for chunk in range(place, chunks, step):
                ptx.load_relaxed_gpu_128(address)  # others go on
                ptx.store_global_128(address + 16 * chunk, MISSING, MISSING, MISSING, MISSING)
        for begin, end, count in ((x, normed, x_words), (source, logits, words)):
            for word in range(place, count, step):
                ptx.load_relaxed_gpu_128(awaited[0])
                ptx.store_relaxed_gpu_f32(end + 4 * word, ptx.load_global_f32(begin + 4 * word))

    values = []
    for name in ("x", "normed", "source", "logits", *(f"awaited_{number}" for number in range(3))):
        tensor = arguments[name]
        num_bytes = tensor.numel() * tensor.element_size()
        values += [tensor] if name in ("x", "source") else [tensor, num_bytes // (16 if "awaited" in name else 4)]
    kernel = SimpleNamespace(function=router, threads=32, shared_bytes=0, cluster=1, signature=[None for _ in values])
    return SimpleNamespace(kernel=kernel, grid=(2, 1, 1), arguments=values, dependent=True)


@pytest.mark.wide
def test_moe_layers_choose_while_their_routers_still_run() -> None:
    """Routers and MoE layers that start as early as they may, in memory that they share: as one after the other."""
    rows, layers, walker = 2, 3, Walker()
    moe_layers = [make_moe(5, 64, 32) for _ in range(layers)]
    given = [moe.arguments(moe.rows(rows), 2) for moe in moe_layers]
    plan = moe_layers[0].plan(rows, 2, small_gpu(2), warps=3)
    choices, found = torch.randn(layers, rows, 5), []
    for together in (False, True):
        normed = torch.full((rows, 64), torch.nan).bfloat16()
        room = torch.full((2, 16), 3.0)  # nobody filled the first layer's
        logits = [each[: rows * 5].view(rows, 5) for each in room]
        activated, partials = torch.full((rows, 2, 32), 5.0).bfloat16(), torch.full((rows, 2, 64), 7.0)
        with walkable(walker, *NAMES) as modules:
            calls, outs = [], []
            for layer, arguments in enumerate(given):
                own, following = layer % 2, (layer + 1) % 2
                calls.append(
                    router_of(
                        modules, x=arguments["x"], normed=normed, source=choices[layer], logits=logits[own],
                        awaited_0=activated, awaited_1=partials, awaited_2=room[following],
                    )
                )  # fmt: skip
                shared = {"x": normed, "activated": activated, "partials": partials}
                mine = {name: arguments[name].clone() for name in ("expert_ids", "expert_weights", "total")}
                calls += modules[-1].experts_mlp(
                    routing=TopKRouting(logits[own]), gpu=small_gpu(2), early=layer > 0, plan=plan,
                    **(arguments | shared | mine),
                )  # fmt: skip
                outs.append(mine)
            for run in [calls] if together else [[call] for call in calls]:
                walker.run(*run)
        found.append(outs)
    for layer in range(layers):
        assert torch.equal(found[0][layer]["expert_ids"], want_routing(TopKRouting(choices[layer]), 2)[0])
        for name, want in found[0][layer].items():
            assert torch.equal(found[1][layer][name], want) and bool(want.isfinite().all())


def test_more_rows_than_a_launch_takes_choose_by_their_own_logits() -> None:
    moe, routing = make_moe(3, 64, 32), TopKRouting(torch.randn(67, 3), torch.ones(1, 67, dtype=torch.uint8))
    arguments = moe.arguments(moe.rows(67), 2)
    calls = experts_mlp(routing=routing, **arguments)
    assert [call.arguments[17] for call in calls] == [128, 6]
    later = [each.data_ptr() for each in calls[1].arguments if isinstance(each, torch.Tensor)]
    assert routing.logits[64:].data_ptr() in later
    assert routing.row_live is not None and routing.row_live.view(-1)[64:].data_ptr() in later
    for name in ("x", "expert_ids", "expert_weights", "activated", "partials", "residual", "total"):
        assert arguments[name][64:].data_ptr() in later


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("gpu", [*GPUS.values(), B200], ids=str)
@pytest.mark.parametrize("quantised", [True, False])
def test_plans_fit_their_gpu(rows: int, gpu: Gpu, quantised: bool) -> None:
    """A block an SM, since all must be there at once; the lists and the threads are those of both plans, and
    a tile is finished a value a lane, or by one warp."""
    held = MXFP4 if quantised else BF16
    up, down = ExpertShape(GATE_UP, 5760, 2880, 4, held), ExpertShape(DOWN, 2880, 2880, 4, held)
    pair = plan_mlp(rows, up, down, gpu)
    first, second = pair.up_plan, pair.down_plan
    assert pair.places[-1] <= gpu.shared_bytes
    assert first.num_blocks == second.num_blocks == gpu.num_multiprocessors
    common = ("columns", "capacity", "finishing", "stages", "suspends")
    assert all(getattr(first, name) == getattr(second, name) for name in common)
    assert pair.whole.threads >= first.capacity >= rows * 4
    assert first.warps == second.warps == pair.warps == warps_of(45) == 15
    assert first.suspends == (gpu.capability >= (9, 0))
    assert first.finishing == 1 or first.finishing * 32 == first.columns * down.values
    if quantised:
        assert (first.columns, first.part, second.part, first.stages) == (min(rows, 8), 3, 3, 2)


def test_steps_are_shared_evenly() -> None:
    for steps in range(1, 400):
        warps = warps_of(steps)
        assert 7 <= warps <= 15
        assert -(-steps // warps) == -(-steps // 15)  # no more steps than with most warps
        assert steps <= 7 or warps == 7 or -(-steps // (warps - 1)) > -(-steps // warps)  # and no warp for nothing


def test_what_no_block_holds_is_refused() -> None:
    wide = ExpertShape(DOWN, 4096, 14336, 2, BF16)
    plan = plan_experts(8, wide, H200)
    assert plan.part < plan.steps_a_warp(wide) == 15
    with pytest.raises(ShapeError, match="GEMM of experts for 8 rows does not fit the 16384 bytes"):
        plan_experts(8, wide, Gpu(132, 16384, (9, 0)))
    with pytest.raises(ShapeError, match="300 experts a row; at most 256"):
        rows_a_launch(300)
    with pytest.raises(ShapeError, match="160 threads list no more"):
        plan_experts(64, ExpertShape(DOWN, 4096, 14336, 4, BF16), H200, warps=1)
    up, down = ExpertShape(GATE_UP, 5760, 2880, 4, MXFP4), ExpertShape(DOWN, 2880, 2880, 4, MXFP4)
    with pytest.raises(ShapeError, match="both GEMMs of experts for 64 rows do not fit the 31000 bytes"):
        plan_mlp(64, up, down, Gpu(132, 31000, (9, 0)))
