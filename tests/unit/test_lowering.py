"""Lowering without a GPU: every operation is covered once and in order, by calls that reach exactly what it names."""

from bisect import bisect_right
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from inserted import with_identities
from kernel_inventory import B200, GPUS, examples, family, fingerprint
from lowered import Lowered
from lowering_cases import (
    ATTENTION,
    HEADS,
    MOE_LAYERS,
    WHOLE,
    LoweredPairs,
    check_early_reads,
    check_savings,
    kinds_of,
    reached,
    span,
)

from lowlat.errors import ConfigError
from lowlat.executors.launcher import parameters_of
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket, BufferSet, BufferSpec, Role
from lowlat.graphs.program import Op, Program, ProgramBuilder, Stage
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.sampling.select import FINITE, INFINITY
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.lowering import lower as lowering
from lowlat.lowering import operations
from lowlat.lowering.binding import Binding
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.fusion import Fusion
from lowlat.lowering.lower import FUSIONS, lower
from lowlat.models.layer_spec import AttentionSpec
from lowlat.models.weight_plan import weight_plan
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.checks import CheckedKinds
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill, build_refresh
from lowlat.step.variants import PROPOSED, WIDE, first_token_bucket

BATCHES = (1, 2, 4, 8)
SPECPV: dict[str, Any] = {"enable_specpv": True, "specpv_n_retrieval_blocks": 4, "specpv_partial_threshold": 0}
TEXTS = ["suffix_draft", "draft_from_texts"]
# what calls reach through tables of addresses, made when the program was lowered
BY_ADDRESS = {"kv_compact"}
LISTED = "layers+rope"  # the group whose KV writes reach their caches so
# where a call takes the best pairs that the product of its logits left, in place of these
BY_BEST = {"draft_topk"}
KINDS = {"uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> LoweredPairs:
    """Buckets of pairs by name."""
    return LoweredPairs(tmp_path_factory)


# the ends of depths and batches, and what lies between
CASES: list[tuple[str, int, int, bool | str]] = [
    *(("llama", depth, batch, False) for depth, batch in ((0, 1), (0, 8), (1, 2), (3, 1), (3, 8), (7, 1), (7, 8))),
    *((name, depth, batch, False) for name in ("qwen3", "demo") for depth, batch in ((0, 1), (3, 4), (7, 8))),
    *(("llama", depth, batch, True) for depth, batch in ((0, 1), (3, 2), (3, 8))),
    *((name, 3, 2, True) for name in ("qwen3", "demo")),
    *((name, 3, 2, False) for name in ("mistral", "qwen2", "tied", "biased", "one_group")),
    *((f"llama+{flags}", 3, 2, False) for flags in HEADS),
    *((f"llama+{flags}", 0, 2, False) for flags in ("everything", "dflash", "dspark")),
    *((f"qwen3+{flags}", 3, 4, True) for flags in ("norm_output", "several_layers", "parallel", "dflash", "dflash2")),
    *((f"qwen3+{flags}", 3, 4, True) for flags in ("dspark", "everything")),
    *(("llama", 3, batch, "dynamic") for batch in (0, 1, 8)),
    *((f"llama+{flags}", 3, 2, "dynamic") for flags in ("norm_output", "several_layers", "parallel", "dflash")),
    *((f"llama+{WHOLE}", depth, batch, False) for depth, batch in ((3, 0), (7, 8))),
    ("tied+target_s_lm_head", 3, 2, False),
    ("llama_fp8", 3, 8, False),
    *(("llama_codes", 3, 2, True), ("qwen3_codes", 3, 4, False), ("llama_codes+dflash", 3, 2, False)),
    ("biased+everything", 3, 2, True),
    *((f"{name}+alone", 0, batch, False) for name in ("llama", *MOE_LAYERS) for batch in (1, 8)),
    *((f"{name}+plain", depth, batch, False) for name in MOE_LAYERS for depth, batch in ((3, 1), (7, 8))),
    *((f"{name}+norm_output", 3, 8, True) for name in MOE_LAYERS),
    *((name, depth, 0, tree) for name in ("llama", "demo") for depth, tree in ((0, False), (3, False), (3, True))),
    *(("gpt_oss+alone", 0, 0, False), ("qwen3+everything", 7, 0, False)),
]

TREES = {False: "chain", True: "tree", "dynamic": "dynamic"}


def check_cover(step: Lowered) -> None:
    """Every operation is covered once and in order."""
    covered = [op for group in step.groups for op in group.ops]
    assert len(covered) == len(step.program.ops)
    assert all(a is b for a, b in zip(covered, step.program.ops, strict=True))
    for group in step.groups:
        assert group.calls
        assert group.ops[0].stage is group.stage


def read_later(program: Program, name: str, after: int) -> Op | None:
    """The operation past `after` that reads what a buffer holds there, if any: looked for forwards, one by one."""
    for op in program.ops[after + 1 :]:
        if name in op.reads.values():
            return op
        if name in op.writes.values() and name not in op.updates:
            return None
    return None


def check_hidden(step: Lowered) -> None:
    """No operation reads a hidden buffer again."""
    place = -1
    for group in step.groups:
        place += len(group.ops)
        written = {name for op in group.ops for name in op.writes.values()}
        assert group.hidden <= written
        for name in group.hidden:
            assert step.program.buffers[name].role is Role.SCRATCH
            reader = read_later(step.program, name, place)
            assert reader is None, f"{name} is hidden by {[op.kind for op in group.ops]} and read by {reader}"
        assert set(group.written) == written - group.hidden


def check_reach(step: Lowered) -> None:
    """Calls reach what their operations name and nothing hidden."""
    for group in step.groups:
        kinds = [op.kind for op in group.ops]
        made: set[str] = set()
        for op in group.ops:
            if op.kind in BY_ADDRESS:
                continue
            unread = {op.reads["logits"]} if op.kind in BY_BEST and op.params["k"] == 1 else set()
            if group.name == LISTED and op.kind == "kv_write":
                unread = set(op.writes.values())
            for name in {*op.reads.values(), *op.writes.values()} - group.hidden - made - unread:
                if step.program.buffers[name].role is not Role.CONSTANT:
                    assert reached(group.kernel_calls, step.buffers[name]), f"{kinds}: no call takes {name}"
            made |= set(op.writes.values()) & group.hidden
        for name in group.hidden:
            assert not reached(group.kernel_calls, step.buffers[name]), f"{kinds}: a call takes {name}, which is hidden"


def check_owners(step: Lowered) -> None:
    """Every tensor of a call is somebody's."""
    owned = sorted(span(tensor) for tensor in step.owned() if tensor.numel())
    starts, ends = [low for low, _ in owned], list(accumulate((high for _, high in owned), max))
    for call in step.calls:
        for number, argument in enumerate(call.arguments):
            if isinstance(argument, torch.Tensor) and argument.numel():
                start, end = span(argument)
                place = bisect_right(starts, start)
                assert place and end <= ends[place - 1], (call.kernel.name, number)


def test_the_moves_of_each_table_s_layers_name_their_own_caches(lowered: LoweredPairs) -> None:
    """A launch moves the layers of one block table, and its list of caches is nobody else's."""
    step = lowered("gpt_oss", 3, 2, tree=True)
    tables: dict[str, list[int]] = {}
    for op in step.program.ops:
        if op.kind == "kv_compact":
            caches = (step.buffers[op.writes[name]].data_ptr() for name in ("k_cache", "v_cache"))
            tables.setdefault(op.reads["block_table"], []).extend(caches)
    moves = [call for call in step.calls if call.kernel.name.startswith("kv_compact")]
    assert len(tables) == len(moves) == 2
    found = {}
    for call in moves:
        table, listed = call.arguments[3], call.arguments[5]
        assert isinstance(table, torch.Tensor) and isinstance(listed, torch.Tensor)
        found[table.data_ptr()] = sorted(listed.tolist())
    assert found == {step.buffers[table].data_ptr(): sorted(caches) for table, caches in tables.items()}


def test_the_moves_of_layers_whose_caches_differ_are_launches_of_their_own(lowered: LoweredPairs) -> None:
    """Of one block table: the first layer has another size and number of heads."""
    known = lowered.pair("llama", tree=True)
    pair, config = copy(known), known.target.config
    spec = config.layers[0].mixer
    assert isinstance(spec, AttentionSpec)
    wide = replace(spec, num_heads=2, num_kv_heads=1, head_dim=256)
    config = replace(config, layers=(replace(config.layers[0], mixer=wide), *config.layers[1:]))
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in weight_plan(config).items()}
    pair.target = replace(pair.target, config=config, weights=weights)
    for name in ("geometry", "source", "weights"):
        pair.__dict__.pop(name, None)
    step = pair.lower(3, 2)
    moves = [call.arguments[5] for call in step.calls if call.kernel.name.startswith("kv_compact")]
    caches = [name for name in step.buffers if name.startswith("k_cache.")]
    assert len(caches) == len(config.layers) > 1
    found = {tuple(sorted(listed.tolist())) for listed in moves if isinstance(listed, torch.Tensor)}
    first = {step.buffers[f"{part}_cache.0"].data_ptr() for part in ("k", "v")}
    assert tuple(sorted(first)) in found and all(not first & set(each) for each in found if len(each) > 2)


def check_arguments(step: Lowered) -> None:
    """Arguments fit their parameters."""
    for call in step.calls:
        kernel = call.kernel
        assert kernel.function.__code__.co_argcount == len(kernel.signature), kernel.name
        widths = [5 + 2 * kind.ndim if hasattr(kind, "ndim") else 1 for kind in kernel.signature]
        assert len(parameters_of(call)) == sum(widths)
        for kind, argument in zip(kernel.signature, call.arguments, strict=True):
            if hasattr(kind, "ndim"):
                assert isinstance(argument, torch.Tensor), kernel.name
                expected = torch.bfloat16 if str(kind.dtype) == "uint16" else KINDS[str(kind.dtype)]
                assert argument.dtype == expected, (kernel.name, kind)
            elif isinstance(argument, torch.Tensor):
                assert str(kind) == "int64", f"{kernel.name}: an address in {kind}"
                assert argument.is_contiguous()
        assert all(size >= 1 for size in call.grid)
        assert call.grid[1] <= 65535
        assert call.grid[2] <= 65535


def check_start(step: Lowered) -> None:
    """A step starts after the last one, and its rows after its start.

    Later kernels may read slots and lengths before they wait: they must start after the kernel that lists them.

    Where the one after it settles, which reads none, they do without its waiting for all.
    """
    waiting = [number for number, call in enumerate(step.calls) if not call.dependent]
    listed = [op.kind for group in step.groups if group.stage is Stage.ACTIVE_SLOTS for op in group.ops]
    if listed[0] == "identity":
        assert waiting == [0, 1, 2] and listed == ["identity", "apply_commands", "gather_rows", "publish_rows"]
    else:
        second = len(step.groups[0].calls)
        assert waiting == [0, *([] if step.calls[second].kernel.waits_before_trigger else [second])]
        assert listed == ["apply_commands", "list_active_slots", "gather_rows", "publish_rows"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-S{case[1]}-B{case[2]}-{TREES[case[3]]}")
def test_a_program_is_lowered_soundly(case: tuple[str, int, int, bool | str], lowered: LoweredPairs) -> None:
    """One lowering, looked at from all sides: nothing is read early either that may still be written."""
    step = lowered(*case)
    for check in (check_cover, check_hidden, check_reach, check_owners, check_arguments, check_start):
        check(step)
    check_early_reads(step)


def test_a_draft_s_attention_is_early(lowered: LoweredPairs) -> None:
    """Of a chain's deeper levels but for their rows, which the launch that settles the rest has made."""
    for name in ("llama", "qwen3", "llama+several_layers"):
        calls = [call for call in lowered(name, 3, 1).calls if call.kernel.name.startswith("attention_")]
        found = [ATTENTION.fullmatch(call.kernel.name) for call in calls if "combine" not in call.kernel.name]
        assert all(each is not None and each[2] for each in found)
        assert sum(each is not None and bool(each[3]) for each in found) == (4 if "several" in name else 2)


def test_tables_of_addresses_point_at_the_caches(lowered: LoweredPairs) -> None:
    step = lowered("llama", 3, 2, True)
    (group,) = (group for group in step.groups if any(op.kind in BY_ADDRESS for op in group.ops))
    caches = [name for op in group.ops if op.kind in BY_ADDRESS for name in op.writes.values()]
    addresses = {step.buffers[name].data_ptr() for name in caches}
    assert len(addresses) == 4  # keys and values of two layers
    tables = [tensor.tolist() for tensor in step.workspace.tensors() if tensor.dtype == torch.int64]
    assert addresses in [set(table) for table in tables]
    others = [tensor for tensor in step.workspace.tensors() if set(tensor.flatten().tolist()) != addresses]
    assert not any(tensor.any() for tensor in others)  # counters start at zero: lowering launches nothing
    step = lowered("llama+dflash", 3, 2)
    (group,) = (group for group in step.groups if group.name == LISTED)
    writes, norms = ([op for op in group.ops if op.kind == kind] for kind in ("kv_write", "qk_norm"))
    table = [
        [*(step.buffers[name].data_ptr() for name in write.writes.values()), weight.data_ptr(), 0]
        for write, weight in zip(writes, (step.weights.vector(op.weights["k_weight"]) for op in norms), strict=True)
    ]
    listed = group.kernel_calls[0].arguments[-1]
    assert len(table) == 2 and isinstance(listed, torch.Tensor) and listed.view(2, 4).tolist() == table


@pytest.mark.parametrize("bushy", [False, True])
def test_a_choice_begins_with_the_pairs_of_its_own_logits(bushy: bool, lowered: LoweredPairs) -> None:
    """Of all rows, and with its own idea of what breaks one; the product is the last that wrote there."""
    step = lowered("llama", 3, 2, bushy)
    left: dict[int, tuple[str, torch.Tensor]] = {}
    chosen = []
    for call in step.calls:
        tensors = [tensor for tensor in call.arguments if isinstance(tensor, torch.Tensor)]
        pairs = [tensor for tensor in tensors if tensor.dim() == 3 and tensor.shape[1:] == (132, 2)]
        name = call.kernel.name
        if "_best" in name:
            (mine,) = pairs
            (logits,) = [t for t in tensors if t.dim() == 2 and t.dtype == torch.float32]
            assert mine.shape[0] == logits.shape[0]
            left[mine.data_ptr()] = name, logits
        elif name.startswith(("sample", "argmax")) or "_pairs" in name:
            (mine,) = pairs
            product, logits = left[mine.data_ptr()]
            assert mine.shape[0] == logits.shape[0]
            assert product.endswith(f"_best132x{FINITE if name.startswith('sample') else INFINITY:x}")
            assert not name.startswith("sample") or any(t.data_ptr() == logits.data_ptr() for t in tensors)
            chosen.append(name.split("_")[0])
    assert chosen[0] == "sample" and chosen.count("sample") == 1
    assert chosen.count("argmax") == 1 and chosen.count("draft") == (0 if bushy else 2)  # a tree's levels rank several


def kernels_of(lowered: LoweredPairs) -> Iterator[Any]:
    for case in CASES:
        for call in lowered(*case).calls:
            yield call.kernel


def test_a_kernel_s_name_stands_for_one_specialisation(lowered: LoweredPairs) -> None:
    names: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for kernel in kernels_of(lowered):
        if id(kernel) not in seen:
            seen[id(kernel)] = kernel.name
            known = names.setdefault(kernel.name, fingerprint(kernel))
            assert known == fingerprint(kernel), kernel.name
    assert len(names) > 100


def test_every_kind_of_kernel_has_an_example_that_is_compiled(lowered: LoweredPairs) -> None:
    known = {family(kernel) for _, kernel in examples()}
    used = {family(kernel) for kernel in kernels_of(lowered)}
    assert used <= known, f"no module's examples() holds {used - known}"


# kernels of attention and of what follows it, in a layer and in a level drafted from the one before; products norm up
# to eight rows for themselves
AFTER = ["attention", "attention_combine", "decode_gemm_add", "decode_gemm_silu", "decode_gemm_add"]
AFTER_MANY = [*AFTER[:3], "norms", *AFTER[3:], "norms"]
QKV = {"llama": ["decode_gemm_rotate"], "qwen2": ["decode_gemm_rotate"], "qwen3": ["decode_gemm_float32", "rotate"]}
LEVEL = ["decode_gemm_rotate", "decode_gemm_rotate", *AFTER, "decode_gemm_float32"]
AROUND = ["begin_step", "sample", "logprobs", "accept"]
AROUND += ["gather_features", "decode_gemm_bfloat16", "draft_input", "publish"]


@pytest.mark.parametrize("name", QKV)
@pytest.mark.parametrize("batch", [1, 8])
def test_kernels_of_a_layer_and_of_a_level(name: str, batch: int, lowered: LoweredPairs) -> None:
    """Every kernel more costs a microsecond a layer: the number is pinned."""
    for depth in (0, 7):
        target = kinds_of(lowered(name, depth, batch), Stage.VERIFY)
        layer = [*QKV[name], *(AFTER if batch * (depth + 1) <= 8 else AFTER_MANY)]
        assert target == ["embed_norm", *layer, *layer, "decode_gemm_float32"]
    drafting = [stage for stage in Stage if stage.startswith("DRAFT_") and stage is not Stage.DRAFT_FC]
    shallow, deep = (kinds_of(lowered(name, depth, batch), *drafting) for depth in (1, 7))
    assert deep == [*shallow[:-1], *6 * ["draft_level_input", *LEVEL], "argmax"]
    around = [stage for stage in Stage if stage not in (*drafting, Stage.VERIFY)]
    for depth in (0, 1, 7):
        assert kinds_of(lowered(name, depth, batch), *around) == AROUND


def test_kernels_of_a_first_token(lowered: LoweredPairs) -> None:
    """The LM head's product over a row that is there, and what is published does not wait for the drafts."""
    begin = ["identity", "begin_step", "decode_gemm_float32", "sample", "logprobs", "accept", "publish"]
    rows = ["accept", "draft_input", "decode_gemm_rotate"]
    assert kinds_of(lowered("llama", 0, 0), *Stage) == [*begin, *rows]
    first = ["take_last", "decode_gemm_rotate", *AFTER, "decode_gemm_float32"]
    deeper = ["draft_level_input", *LEVEL]
    assert kinds_of(lowered("llama", 3, 0), *Stage) == [*begin, *rows, *first, *2 * deeper, "argmax", "publish"]


def test_a_draft_model_s_layers_before_its_last_cost_what_a_target_s_do(lowered: LoweredPairs) -> None:
    """Over the accepted rows, and over each deeper level's; attention with a window is not split."""
    windowed = [kernel for kernel in AFTER if kernel != "attention_combine"]
    before = [*("decode_gemm_rotate", *AFTER), *("decode_gemm_rotate", *windowed), "norms", "decode_gemm_rotate"]
    last = ["decode_gemm_rotate", *windowed, "decode_gemm_float32"]
    drafting = [stage for stage in Stage if stage.startswith("DRAFT_") and stage is not Stage.DRAFT_FC]
    for depth in (1, 3):
        expected = [*before, "take_last", *last, *["draft_level_input", *before, *last] * (depth - 1), "argmax"]
        assert kinds_of(lowered("llama+several_layers", depth, 2), *drafting) == expected


@pytest.mark.parametrize("depth", [2, 7])
def test_parallel_drafts_cost_one_pass_whatever_their_number(depth: int, lowered: LoweredPairs) -> None:
    """The draft model's weights are read once: each product stands there once."""
    drafting = [stage for stage in Stage if stage.startswith("DRAFT_") and stage is not Stage.DRAFT_FC]
    for batch in (0, 1):
        kinds = kinds_of(lowered("llama+parallel", depth, batch), *drafting)
        assert sum(kind.startswith("decode_gemm") for kind in kinds) == 10  # two layers', the LM head's
        assert kinds.count("take_block") == 1 and "draft_input" not in kinds
        every = [call.kernel.name for call in lowered("llama+parallel", depth, batch).calls]
        assert sum(name.startswith("block_input") for name in every) == 1
        kinds = kinds_of(lowered("llama+dflash", depth, batch), *drafting)
        products = sum(kind.startswith("decode_gemm") for kind in kinds)
        assert products == 2 * 4 + 1 + bool(batch)  # of accepted rows all layers' keys and values at once, after fc
        assert sum("layers2" in call.kernel.name for call in lowered("llama+dflash", depth, batch).calls) == bool(batch)


def test_dsparks_levels_have_small_products_alone(lowered: LoweredPairs) -> None:
    """A layer over the block, LM head and the gate of all states; by level the gate of a token, its biased logits with
    their partial argmax, and the choice, which has the next level's vectors."""
    drafting = [stage for stage in Stage if stage.startswith("DRAFT_")]
    kinds = kinds_of(lowered("llama+dspark", 3, 0), *drafting)
    products = sum(kind.startswith("decode_gemm") for kind in kinds)
    assert products == 4 + 2 + 2 * 3
    level = ["decode_gemm_float32", "markov_gate", "decode_gemm_float32", "argmax"]
    assert kinds[-13:] == ["parent_vectors", *level * 3]
    kinds = kinds_of(lowered("llama+dspark", 3, 0, tree=True), *drafting)  # of a tree's levels the last is a chain's
    level = ["parent_vectors", "decode_gemm_float32", "markov_gate", "decode_gemm_float32"]
    assert kinds[-15:] == [*level, "draft_topk", *level, "draft_topk", *level, "argmax"]


def test_no_row_count_has_other_kernels_but_products_and_attention(lowered: LoweredPairs) -> None:
    """Kernels that decide bits do not depend on the bucket: plans of GEMMs and attention may, and change no bit, and
    norms may be made by the product after them."""
    for name in QKV:
        kinds = {
            batch: [kind for kind in kinds_of(lowered(name, 3, batch), *Stage) if kind != "norms"] for batch in BATCHES
        }
        assert all(each == kinds[1] for each in kinds.values())


@pytest.mark.parametrize("gpu", [*GPUS.values(), B200], ids=str)
@pytest.mark.parametrize("name", ["llama", "demo"])
def test_every_gpu_gets_kernels_that_fit_it(name: str, gpu: Gpu, lowered: LoweredPairs) -> None:
    for depth in (0, 7):
        for call in lowered(name, depth, 8, gpu=gpu).calls:
            assert call.kernel.shared_bytes <= gpu.shared_bytes, call.kernel.name


@pytest.mark.parametrize(
    "speculation",
    [{"simulated_acceptance": 0.75, "simulated_seed": 3}, {"draft_window": 64}, SPECPV],
    ids=["simulated", "window", "specpv"],
)
def test_options_of_speculation_are_lowered_too(speculation: dict[str, Any], lowered: LoweredPairs) -> None:
    step, plain = lowered("llama", 3, 2, **speculation), lowered("llama", 3, 2)
    check_cover(step)
    check_reach(step)
    assert {call.kernel.name for call in step.calls} != {call.kernel.name for call in plain.calls}


@pytest.mark.parametrize("name", ["llama", "llama+parallel"])
def test_checks_are_lowered_too(name: str, lowered: LoweredPairs) -> None:
    """Each by its own kernel, and rows are laid out, and drafts accepted, by the kernels that are left around them."""
    pair = lowered.pair(name, tree=True)
    geometry = replace(pair.geometry, checks=CheckedKinds(masks=True, spans=True, lengths=True, falls_back=True))
    topology, known = pair.topologies[3], {family(kernel) for _, kernel in examples()}
    for bucket in (Bucket(2, topology.num_nodes, 3), first_token_bucket(3)):
        step = pair.lower_program(build_step(geometry, bucket, topology))
        check_cover(step)
        check_reach(step)
        check_owners(step)
        check_arguments(step)
        check_early_reads(step)
        groups = [group.name for group in step.groups]
        assert [each for each in groups if each.startswith("check_")] == [
            *("check_slots", "check_rows", "check_accepted", "check_commit")
        ]
        behind = step.groups[groups.index("check_rows") + 1]
        call = behind.kernel_calls[0]
        assert behind.stage is not Stage.ACTIVE_SLOTS and (not call.dependent or call.kernel.waits_before_trigger)
        assert {family(call.kernel) for call in step.calls} <= known


def test_what_prefill_does_for_specpv_is_lowered(lowered: LoweredPairs) -> None:
    pair = lowered.pair("llama", **SPECPV)
    for program in (build_prefill(pair.geometry, 32), build_refresh(pair.geometry)):
        made = pair.lower_program(program)
        check_cover(made)
        names = kinds_of(made, Stage.PREFILL)
        assert [names.count(name) for name in ("summarise_blocks", "block_scores", "choose_blocks")] == [2, 2, 2]
    lossless = lowered.pair("llama", **SPECPV, specpv_lossless=True, specpv_n_spec_tokens_buf=31)
    geometry = lossless.geometry
    verifier = build_step(geometry, Bucket(8, geometry.max_rows, 7, WIDE), TreeTopology.chain(7))
    for program in (verifier, build_refresh(geometry)):
        check_cover(lossless.lower_program(program))
    assert geometry.max_rows == 32 and not any(op.kind == "partial_attention" for op in verifier.ops)
    assert not any(op.kind in ("kv_write", "prefill_kv_write") for op in program.ops)  # a refresh's
    assert not any(op.kind in ("partial_attention", "refresh_attention") for op in program.ops)


@pytest.mark.parametrize(("method", "opening"), [({}, TEXTS[:1]), ({"draft_text_tokens": 64}, TEXTS)])
def test_a_wide_step_opens_with_proposals(method: dict[str, Any], opening: list[str], lowered: LoweredPairs) -> None:
    """They are launched alone; all after them as in a step of the usual length, with the draft model's rows alone."""
    pair = lowered.pair("llama", text_drafts="suffix", wide_rows=32, **method)
    for batch, rows in ((1, 32), (4, 16)):
        program = build_step(pair.geometry, Bucket(batch, rows, 0, PROPOSED), TreeTopology.chain(0))
        made = pair.lower_program(program)
        check_cover(made)
        names = kinds_of(made, Stage.ACTIVE_SLOTS)
        assert [name for name in names if name in ("open_proposals", *TEXTS)] == ["open_proposals", *opening]
        kinds = [op.kind for op in program.ops]
        assert kinds.index("publish") < kinds.index("draft_rows") and "draft_topk" not in kinds


def small_program(then: str) -> Program:
    """A product, the sum that takes it, and another reader of it, or a later product in its place."""
    builder = ProgramBuilder("small", OPERATIONS)
    for name in ("x", "residual"):
        builder.declare(BufferSpec(name, (2, 64), torch.bfloat16, Role.STATE))
    for name, dtype in (("product", torch.float32), ("out", torch.bfloat16), ("rounded", torch.bfloat16)):
        builder.scratch(name, (2, 64), dtype)
    linear = {"reads": {"x": "x"}, "writes": {"out": "product"}, "weights": {"weight": "w.weight"}, "row_block": 8}
    builder.emit("linear", Stage.VERIFY, **linear)  # type: ignore[arg-type]
    builder.emit("add", Stage.VERIFY, reads={"a": "residual", "b": "product"}, writes={"out": "out"})
    if then == "overwritten":
        builder.emit("linear", Stage.VERIFY, **linear)  # type: ignore[arg-type]
    builder.emit("cast", Stage.VERIFY, reads={"x": "product"}, writes={"out": "rounded"})
    return builder.build()


@pytest.mark.parametrize(("then", "hidden"), [("read", False), ("overwritten", True)])
def test_a_product_is_fused_away_only_where_nobody_needs_it(then: str, hidden: bool) -> None:
    program = small_program(then)
    step = lowered_alone(program)
    assert [op for group in step.groups for op in group.ops] == list(program.ops)
    assert (step.groups[0].hidden == {"product"}) == hidden
    check_hidden(step)
    check_reach(step)


def lowered_alone(program: Program) -> Lowered:
    """A program without files: one square weight."""
    cpu = torch.device("cpu")
    buffers = BufferSet(program.specs(*Role), cpu, program.constants)
    weights = DeviceWeights({"w.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}, {"w.weight"}, cpu)
    workspace = SharedWorkspace(cpu)
    groups = lower(Binding(program, buffers, weights, H200, workspace))
    return Lowered(program, buffers, weights, workspace, groups)


def test_the_properties_above_see_a_fusion_that_hides_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    known = next(fusion for fusion in FUSIONS if fusion.name == "gemm+add")

    class Greedy(Fusion):
        def match(self, program: Program, start: int, gpu: Gpu, layout_of: Any) -> Any:
            return replace(known, hides=lambda run: ()).match(program, start, gpu, layout_of)

    greedy = Greedy(known.name, known.pattern, known.saves, known.lower, known.applies, known.hides)
    monkeypatch.setattr(lowering, "FUSIONS", (greedy,))
    step = lowered_alone(small_program("read"))
    with pytest.raises(AssertionError, match="is hidden by"):
        check_hidden(step)


def without(program: Program, kind: str) -> Program:
    """The program, the first operation of a kind left out."""
    place = next(number for number, op in enumerate(program.ops) if op.kind == kind)
    return replace(program, ops=program.ops[:place] + program.ops[place + 1 :])


@pytest.mark.parametrize(
    "kind", ["list_active_slots", "sample", "truncate", "rope", "publish", "concat_norms", "router"]
)
def test_no_operation_demands_its_neighbours(kind: str, lowered: LoweredPairs) -> None:
    """The rest of an interrupted fusion's run is covered by other kernels."""
    step = lowered("gpt_oss+alone", 0, 2) if kind == "router" else lowered("qwen3", 3, 2)
    program = without(step.program, kind)
    groups = lower(Binding(program, step.buffers, step.weights, H200, step.workspace))
    assert [op for group in groups for op in group.ops] == list(program.ops)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "qwen3+everything", "gpt_oss", "gpt_oss_mxfp4+alone"])
def test_identities_anywhere_cost_the_fusions_that_they_interrupt(name: str, seed: int, lowered: LoweredPairs) -> None:
    """And nothing else; what is copied is read in its place, before a kernel waits too."""
    depth = 0 if name.endswith("alone") else 3
    plain = lowered(name, depth, 2)
    step = lowered.pair(name).lower_program(with_identities(plain.program, 12, seed))
    assert len(step.groups) > len(plain.groups)
    check_cover(step)
    check_hidden(step)
    check_reach(step)
    check_owners(step)
    check_early_reads(step)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gpt_oss_mxfp4", "llama+everything"])
def test_a_fusion_saves_the_launches_that_it_says(name: str, lowered: LoweredPairs) -> None:
    """Of every fusion that a step uses, against its operations' own kernels."""
    assert len(check_savings(lowered(name, 3, 2, name == "llama"))) >= 8


def test_an_operation_without_an_entry_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {kind: entry for kind, entry in operations.OPERATIONS.items() if kind != "cast"}
    monkeypatch.setattr(operations, "OPERATIONS", kept)
    with pytest.raises(ConfigError, match="small: operation cast has no kernel; use executor='reference'"):
        lowered_alone(small_program("read"))
