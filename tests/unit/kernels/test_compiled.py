"""Every kernel compiles without a GPU for every capability: no local memory, no more registers or shared memory than a
GPU has, wide accesses and tensor cores where they count, and only the instructions that were meant.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from compiled_examples import CAPABILITIES, FOLDERS, Compiled, daily, stage_of, widely
from kernel_inventory import GPUS, examples, factories, family, fingerprint, modules, offers_calls
from moe_cases import make_moe, make_topk_routing
from stages import later, wide

from lowlat.kernels.elementwise import norm, norm_add, rotate
from lowlat.kernels.gemm.prefill import gemm as prefill_gemm
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.toolchain.compiler import CompiledKernel, compile_kernel
from lowlat.kernels.toolchain.kernel import H200, Kernel
from lowlat.kernels.toolchain.link_checks import count_opcodes, instructions, whole_instructions
from lowlat.kernels.toolchain.numba_cuda import compile_ptx, target_of

pytestmark = pytest.mark.timeout(900)  # the first case compiles everything

HOPPER = (9, 0)
REGISTERS = 65536  # of an SM, of every capability from 8.0 on
REGISTERS_A_THREAD, NO_REGISTER = 255, 255
# of shared memory, by the system, next to what a block may have; for 9.0 the linker counts them as the kernel's
RESERVED_BYTES = {HOPPER: 1024}
CASES = [
    ("first", HOPPER, "elementwise"),
    ("first", HOPPER, "sampling"),
    ("first", HOPPER, "attention"),
    *(later("second", HOPPER, folder) for folder in FOLDERS),
    *(later("second", capability, None) for capability in CAPABILITIES if capability != HOPPER),
    *(wide("wide", capability, folder) for capability in CAPABILITIES for folder in FOLDERS),
]
WIDE = re.compile(r"(ld|st)\.(global|shared)[.\w:]*\.v4|cp\.async\.cg")
# what moves a few words at a time: slots, tokens, counters, choices; or rows of a width that 16 bytes do not divide
NARROW = re.compile(
    r"accept|advance_states|argmax|begin_step|check_|place_table|finite|publish|assign_drafts|forward_commands|all_gather|"
    r"(mask_row|parent_token|token_row|waiting_row)s|(ngram|suffix)_draft|draft_from_texts|open_proposals|"
    r"choose_(drafts|nodes|draft_length|blocks)|grow_block_tree|hand_over_tree|(join|learn_draft)_lengths|list_lens|"
    r"route_top_k|keep_prompt_logprobs|advance_states|"
    r"\w+_97(_|$)"
)
PRODUCTS = re.compile(
    r"decode_gemm|narrow_gemm|attention_\d|experts_(grouped_|gemm_|mlp)|gated_delta_tiles|prefill_gated_delta_\d"
)
CODES = re.compile(r"attention_\d.*_[cd]$")
ACTIVATING = re.compile(r"silu|gelu|swiglu|gated|gate_up|experts_(grouped|gemm|mlp)|expert")
# 8.x lacks registers for attention's tiles, the widest router's weights and the pairs that a warp groups: some hundred
# bytes a thread, once
SPILLS, SPILLED_BYTES = re.compile(r"attention_\d|router_n6144|experts_grouping"), 256
# double precision is rare on most GPUs; here it turns exact integers into thresholds, some a row
DOUBLES = re.compile(r"sample_")


@pytest.mark.parametrize(("stage", "capability", "folder"), CASES)
def test_kernels_fit_their_gpu_and_have_the_instructions_that_were_meant(
    stage: str, capability: tuple[int, int], folder: str | None, compiled: Compiled
) -> None:
    """All examples of a stage, of one folder or of all."""
    for module, kernel in (*daily(capability), *(widely(capability) if stage == "wide" else ())):
        if (
            folder in (None, module.partition(".")[0])
            and stage_of(capability, kernel) == stage
            and compiled.takes(kernel)
        ):
            with named(f"{capability} {kernel.name}"):
                check_kernel(capability, kernel, *compiled.of(capability, kernel))


@contextmanager
def named(name: str) -> Iterator[None]:
    """Let a failed check say what was checked."""
    try:
        yield
    except AssertionError as error:
        error.add_note(name)
        raise


def check_kernel(capability: tuple[int, int], kernel: Kernel, made: CompiledKernel, ptx: str) -> None:
    """Its instructions, and what it takes of a GPU."""
    check_instructions(capability, kernel, ptx)
    assert ".local" not in ptx
    if not kernel.linked:
        assert made.code.decode() == ptx
        return
    assert made.is_cubin
    assert made.stack_bytes <= (SPILLED_BYTES if capability < HOPPER and SPILLS.match(kernel.name) else 0)
    assert 0 < made.registers <= REGISTERS_A_THREAD
    assert kernel.threads * made.registers * kernel.min_blocks <= REGISTERS
    quarter = -(-kernel.threads // 128) * 32 * (-(-made.registers // 8) * 8)  # where every fourth warp is
    assert quarter <= REGISTERS // 4
    static = max(made.shared_bytes - RESERVED_BYTES.get(capability, 0), 0)
    assert kernel.shared_bytes + static <= GPUS[capability].shared_bytes


@pytest.mark.second
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_is_done_once_for_all_capabilities_is_what_each_would_get(
    capability: tuple[int, int], compiled: Compiled
) -> None:
    kernel = next(kernel for _, kernel in daily(capability) if re.match("argmax|embed_norm", kernel.name))
    bounds = (kernel.threads, kernel.min_blocks)
    alone, _ = compile_ptx(kernel.function, kernel.signature, capability, bounds)
    assert unnamed(alone) == unnamed(compiled.of(capability, kernel)[1])


def unnamed(ptx: str) -> str:
    """A kernel without the names that count what was compiled before it."""
    return re.sub(r"_smem_\d+", "_smem", re.sub(r"_ZN\w+", "_ZN", ptx))


def opcodes(ptx: str) -> set[str]:
    """The instructions of a kernel, without their operands and predicates."""
    statements = re.split(r"[;{}\n]", ptx)
    found = (re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)", statement) for statement in statements)
    return {match.group(1) for match in found if match}


def check_instructions(capability: tuple[int, int], kernel: Kernel, ptx: str) -> None:
    """Wide accesses, tensor cores, no double precision, no approximation but those meant, votes of whole warps."""
    used = opcodes(ptx)
    assert ptx.count(".entry") == 1
    assert f".target {target_of(capability, kernel.specific)}\n" in ptx
    assert ("griddepcontrol.wait" in used) == (capability >= HOPPER)
    assert capability >= HOPPER or "griddepcontrol" not in ptx
    if not NARROW.match(kernel.name):
        assert any(WIDE.match(each) for each in used), "no access of 16 bytes"
    if PRODUCTS.match(kernel.name):
        kind = "f16" if CODES.match(kernel.name) else "bf16"
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" in used
        assert any(each.startswith("cp.async.cg.shared.global") for each in used)  # of 16 bytes: they know no others
    doubles = {each for each in used if ".f64" in each}
    assert not doubles or DOUBLES.match(kernel.name), f"integers of mixed signs become doubles: {doubles}"
    # fast-math: everything but exponentials, the reciprocals of gated activations, and one that is put right
    approximations = {each for each in used if ".approx" in each or ".full" in each}
    put_right = {"rcp.approx.f32"} if kernel.name.startswith("prefill_flash") else set()
    activating = {"rcp.approx.ftz.f32"} if ACTIVATING.search(kernel.name) else set()
    assert approximations <= {"ex2.approx.f32", "ex2.approx.ftz.f32", *put_right, *activating}
    assert any(each.startswith("call") for each in used) == (not kernel.linked), "a function that was not inlined"
    # a vote of a block's threads where lanes of a warp come from different branches is an instruction no GPU executes
    for block in re.split(r"^\$L__\w+:", ptx, flags=re.MULTILINE):
        before, vote, _ = block.partition("bar.red.")
        assert not vote or "bar.warp.sync" in before, "a barrier that votes wants whole warps"


@pytest.mark.wide
def test_a_moe_in_parts_of_one_step_finds_the_next_unit() -> None:
    """Where the assembler counts twice, if a unit's number is not `varying`: with bf16 weights, in such parts alone."""
    moe, top_k = make_moe(4, 2880, 2880, quantised=False), 4
    arguments, routing = moe.arguments(moe.rows(8), top_k), make_topk_routing("random", 8, top_k, 4)
    (call,) = experts_mlp(routing=routing, gpu=H200, plan=moe.plan(8, top_k, H200, part=1), **arguments)
    assert compile_kernel(call.kernel, HOPPER).is_cubin  # checked when it is linked


@pytest.mark.parametrize("capability", [later(each) if each == HOPPER else wide(each) for each in CAPABILITIES])
def test_whoever_waits_for_another_block_gives_up_some_time(capability: tuple[int, int], compiled: Compiled) -> None:
    """A launch that would spin for ever fails, so that the host hears of it and the process can end.

    One that waits for another rank's words ends when the host or a rank says so; shares of rows wait for nothing else,
    and read past the first cache what other ranks wrote.
    """
    waiting = set()
    for _, kernel in (*daily(capability), *(widely(capability) if capability != HOPPER else ())):
        _, ptx = compiled.of(capability, kernel)
        if "ld.relaxed.sys" in ptx:
            assert "ld.acquire.sys" in ptx, f"{capability}: {kernel.name}"
        if "ld.acquire.gpu" in ptx or ("ld.relaxed.gpu" in ptx and not kernel.name.startswith("share_rows")):
            assert "trap;" in ptx, f"{capability}: {kernel.name}"
            waiting.add(family(kernel))
    assert capability > HOPPER or len(waiting) >= 3  # the MoE layer, top-k routing, the sampler


@pytest.mark.second
def test_streams_are_read_past_the_first_cache(compiled: Compiled) -> None:
    for _, kernel in daily(HOPPER):
        if kernel.name.startswith("stream_read"):
            _, ptx = compiled.of(HOPPER, kernel)
            assert "ld.global.nc.L1::no_allocate.L2::128B.v4.u32" in ptx


@pytest.mark.second
def test_a_moe_lets_the_next_kernel_start_only_when_the_one_before_has_ended(compiled: Compiled) -> None:
    """In both kinds of its warps, and whether or not it began to read before."""
    kernels = [kernel for _, kernel in daily(HOPPER) if kernel.name.startswith("experts_mlp")]
    assert kernels
    for kernel in kernels:
        ptx = re.sub(r"//.*", "", compiled.of(HOPPER, kernel)[1])
        together = re.findall(r"griddepcontrol\.wait;\s*griddepcontrol\.launch_dependents;", ptx)
        assert len(together) == ptx.count("griddepcontrol.launch_dependents;") == 2


@pytest.mark.second
def test_a_kernel_that_settles_lets_the_next_one_start_behind_its_wait(compiled: Compiled) -> None:
    kernels = [kernel for _, kernel in daily(HOPPER) if kernel.waits_before_trigger]
    assert {"embed", "norms", "draft", "take", "rotate", "mask"} <= {kernel.name.split("_")[0] for kernel in kernels}
    for kernel in kernels:
        ptx = re.sub(r"//.*", "", compiled.of(HOPPER, kernel)[1])
        assert ptx.count("griddepcontrol.wait;") == ptx.count("griddepcontrol.launch_dependents;") == 1, kernel.name
        assert re.search(r"griddepcontrol\.wait;\s*griddepcontrol\.launch_dependents;", ptx), kernel.name


@pytest.mark.second
def test_a_step_s_small_kernels_let_the_next_one_start_first(compiled: Compiled) -> None:
    """And then wait, before they store anything."""
    for module in (norm, norm_add, rotate):
        kernel = next(kernel for kernel in module.examples() if kernel.name.endswith("_first"))
        assert not kernel.waits_before_trigger
        ptx = re.sub(r"//.*", "", compiled.of(HOPPER, kernel)[1])
        before, after = ptx.split("griddepcontrol.wait;")
        assert before.count("griddepcontrol.launch_dependents;") == 1 and "st.global" not in before, kernel.name
        assert "griddepcontrol.launch_dependents;" not in after, kernel.name


@pytest.mark.second
def test_norms_ask_for_their_weights_before_they_wait(compiled: Compiled) -> None:
    """In machine code: the assembler may move loads past the wait."""
    load, wait = 0x981, 0x82E
    names = (
        "norm_add",
        "norms_",
        "two_norms",
        "add_norm",
        "embed_norm",
        "arranged_",
        "concat_norms",
        "mask_input",
        "draft_input",
    )
    kernels = [kernel for _, kernel in daily(HOPPER) if kernel.name.startswith(names)]
    assert {name for name in names if any(kernel.name.startswith(name) for kernel in kernels)} == set(names)
    for kernel in kernels:
        code = [low & 0xFFF for low in instructions(compiled.of(HOPPER, kernel)[0].code)]
        assert code.count(wait) == 1 and load in code[: code.index(wait)], kernel.name


@pytest.mark.second
def test_tensor_cores_of_a_warpgroup_have_their_registers_to_themselves(compiled: Compiled) -> None:
    """Nothing is loaded or moved there until they are awaited; the assembler waits no more often than it was told."""
    names = ("prefill_gemm", "prefill_flash", "experts_warpgroups")
    kernels = [kernel for _, kernel in daily(HOPPER) if kernel.name.startswith(names)]
    assert {name for name in names if any(kernel.name.startswith(name) for kernel in kernels)} == set(names)
    for kernel in kernels:
        check_warpgroups(kernel, *compiled.of(HOPPER, kernel))


GATED_TOTALS = [
    kernel
    for kernel in prefill_gemm.examples()
    if re.match(r"prefill_gemm_.*_[2-8]x\d+_.*_whole_.*_gated", kernel.name)
]


@pytest.mark.parametrize("kernel", [later(GATED_TOTALS[0]), *map(wide, GATED_TOTALS[1:])], ids=lambda each: each.name)
def test_gates_of_added_segments_leave_tensor_cores_their_registers(kernel: Kernel) -> None:
    """No register is spilled where totals, some of them in shared memory, are activated."""
    ptx, _ = compile_ptx(kernel.function, kernel.signature, HOPPER, (kernel.threads, kernel.min_blocks), True)
    made = compile_kernel(kernel, HOPPER)
    check_kernel(HOPPER, kernel, made, ptx)
    check_warpgroups(kernel, made, ptx)


def check_warpgroups(kernel: Kernel, code: CompiledKernel, ptx: str) -> None:
    """Registers of products that are under way, in machine code."""
    # to begin or await products of a warpgroup; one, of bf16 and of codes; one of shared memory
    group, multiply, shared = 0x9C5, (0xDF0, 0xDF3), 0x9F0
    load, loaded = 0x184, {6: 4, 5: 2}  # registers by the load's size; else one
    # whatever form of operands they have: registers that are loaded, moved and selected; results of arithmetic
    moves, selections, products = (0x002, 0x005), (0x007, 0x008, 0x009), (0x020, 0x021, 0x023, 0x031, 0x032)
    integers = (0x010, 0x011, 0x012, 0x016, 0x019, 0x024, 0x036)
    writers = dict.fromkeys((load, *moves, *selections, *products, *integers, 0x03E, 0x108), 1) | {0x025: 2}
    steps: list[set[int]] = []  # registers of those under way, the oldest first
    scores: set[int] = set()
    for low, high in whole_instructions(code.code):
        opcode, target, first = low & 0xFFF, low >> 16 & 0xFF, low >> 24 & 0xFF
        sums = 4 * ((low >> 53 & 0x3F) + 1)  # of eighths of the second matrix's rows, less one
        if opcode in multiply:
            steps[-1] |= {*range(target, target + sums), *range(first, first + 4)}
        elif opcode == shared:
            scores |= set(range(target, target + sums))
        elif opcode == group and low >> 47 & 1:
            scores.clear()  # always the oldest under way
            del steps[: len(steps) - (high >> 8 & 0xFF)]
        elif opcode == group:
            steps.append(set())
        elif opcode & 0x1FF in writers and target != NO_REGISTER:
            count = loaded.get(high >> 9 & 7, 1) if opcode & 0x1FF == load else writers[opcode & 0x1FF]
            written = set(range(target, target + count))
            assert not scores.union(*steps) & written, f"{kernel.name}: {low:#x}"
    found = count_opcodes(code.code)
    assert found[group] == ptx.count("wgmma.fence.sync") + ptx.count("wgmma.wait_group.sync")
    assert sum(found[each] for each in (*multiply, shared)) == ptx.count("wgmma.mma_async") > 0


def test_no_module_with_kernels_is_forgotten() -> None:
    makers = defaultdict(set)
    for _, kernel in examples(H200):
        makers[kernel.function.__module__.removeprefix("lowlat.kernels.")].add(kernel)
    assert {name.partition(".")[0] for name, _ in daily(HOPPER)} <= {*FOLDERS}
    for name, module in modules().items():
        if name != "toolchain.kernel" and offers_calls(module):
            assert hasattr(module, "examples"), f"{name} offers {offers_calls(module)} and has no examples()"
            assert list(module.examples()), f"{name}.examples() is empty"
        kinds = {family(kernel) for kernel in makers[name]}
        assert len(kinds) >= len(factories(module)), f"{name} makes {factories(module)}, its examples are {kinds}"


def test_a_name_stands_for_one_specialisation() -> None:
    for gpu in GPUS.values():
        names: dict[str, Any] = {}
        made = [kernel for _, kernel in examples(gpu)]
        for kernel in made:
            known = names.setdefault(kernel.name, fingerprint(kernel))
            assert known == fingerprint(kernel), f"two kernels are called {kernel.name} for {gpu.capability}"
        assert len(names) == len(made)
        assert len(set(names.values())) == len(names)  # fingerprints see constants in whatever a kernel calls
