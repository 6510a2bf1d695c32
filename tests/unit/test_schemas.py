"""Schemas of operations: they fit their functions, valid programs pass, and every kind of fault is named."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from inserted import with_identities
from lowered import Pair
from lowering_cases import HEADS, MOE_LAYERS, SHAPES, TARGETS, WHOLE, write_pair
from stages import later
from tiny_models import make_target

from lowlat.errors import ConfigError
from lowlat.executors.reference import bind
from lowlat.graphs import BufferSet, BufferSpec, Role
from lowlat.graphs.extents import evaluate, parse, solve
from lowlat.graphs.program import Op, Program, ProgramBuilder, Stage
from lowlat.graphs.schema import operation, operations_of
from lowlat.graphs.schema_check import ArrayType, check_operation
from lowlat.kernels.formats import dequantised
from lowlat.kernels.reference import OPERATIONS
from lowlat.step.prefill import build_prefills

KINDS_OF_TREES: dict[str, bool | str] = {"llama": True, "mistral": "dynamic", "llama+parallel": "dynamic"}
NAMES = (*(f"{target}+alone" for target in MOE_LAYERS), *TARGETS, *(f"llama+{head}" for head in (*HEADS, WHOLE)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    """A target and perhaps its draft model of every kind, by name."""

    def make(name: str) -> Pair:
        files = write_pair(name, tmp_path_factory.mktemp(re.sub(r"\W", "_", name)))
        return Pair(*files, **SHAPES[KINDS_OF_TREES.get(name, False)])

    hybrid = tmp_path_factory.mktemp("hybrid")
    make_target(hybrid, "qwen3_5_moe_text", shared_expert_intermediate_size=40)
    return {name: make(name) for name in NAMES} | {"hybrid": Pair(hybrid, None)}


def programs_of(pair: Pair) -> Iterator[Program]:
    """Steps and first tokens of few and of most drafts, or none, and prefills of every size."""
    for depth in sorted({*list(pair.topologies)[:3], max(pair.topologies)}):
        yield pair.program(depth, 2)
        yield pair.program(depth, 0)
    yield from build_prefills(pair.geometry).values()


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_schema_has_its_functions_arguments(kind: str) -> None:
    """Every parameter of the function is an array with a line or a host constant; outputs are keywords."""
    found = OPERATIONS[kind]
    signature = inspect.signature(found.function).parameters
    single = {name: each for name, each in found.schema.arguments.items() if each.count is None}
    plain = {name: each for name, each in signature.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
    assert set(single) | set(found.schema.parameters) == set(plain) and found.kind == found.function.__name__
    assert (len(single) < len(found.schema.arguments)) == (len(plain) < len(signature))
    for name, argument in single.items():
        tensor, optional = plain[name].annotation, plain[name].default is None
        assert tensor == (torch.Tensor | None if argument.optional else torch.Tensor)
        assert argument.optional == optional
        if argument.access in ("write", "update"):
            assert plain[name].kind is inspect.Parameter.KEYWORD_ONLY, name
    for name, parameter in found.schema.parameters.items():
        assert parameter.required or parameter.accepts(plain[name].default)
        assert set(parameter.types) <= {int, float, bool, str, type(None)}
    assert any(argument.access in ("write", "update") for argument in found.schema.arguments.values())


@pytest.mark.second
def test_all_programs_fit_down_to_the_shapes_of_their_weights(pairs: Mapping[str, Pair]) -> None:
    """Programs know no weights' shapes, but here they are known: they must unify, too."""
    kinds = set()
    fitted: set[tuple[object, ...]] = set()
    for pair in pairs.values():
        whole: dict[str, torch.Tensor] = {}
        for program in programs_of(pair):  # which are validated when they are built
            for op in program.ops:
                names = op.weights.items()
                for name in op.weights.values():
                    if name not in whole:
                        whole[name] = pair.source[name] if name in pair.source else dequantised(name, pair.source)
                weights = {arg: whole[name] for arg, name in names}
                given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
                arrays = (*types_of(program, op), given)
                key = (op.kind, *(tuple(each.items()) for each in (*arrays, op.params)))
                if key not in fitted:  # layers and depths are alike
                    check_operation(OPERATIONS[op.kind].schema, *arrays, op.params)
                    fitted.add(key)
                kinds.add(op.kind)
    unused = {"accept_simulated", "ngram_draft", "suffix_draft", "choose_drafts", "choose_draft_length", "join_lengths"}
    unused |= {"waiting_rows", "take_features", "keep_features", "learn_draft_lengths"}
    unused |= {"summarise_blocks", "choose_blocks", "list_lens", "partial_attention", "refresh_attention"}  # SpecPV's
    unused |= {"open_proposals", "draft_from_texts"}  # of wide steps, and of texts that requests name
    unused |= {"scale", "per_layer_gate", "per_layer_inputs"}  # of Gemma 4, see test_lowering_gemma
    unused |= {"gather_ranks", "all_gather", "sum_ranks"}  # of several ranks
    unused |= {"check_slots", "check_rows", "check_accepted", "check_commit"}  # where checks are asked for
    assert kinds == set(OPERATIONS) - unused


def types_of(program: Program, op: Op) -> tuple[dict[str, ArrayType], dict[str, ArrayType]]:
    """The types of an operation's reads and writes."""
    specs = program.buffers
    reads, writes = (
        {argument: (specs[name].shape, specs[name].dtype) for argument, name in part.items()}
        for part in (op.reads, op.writes)
    )
    return reads, writes


def mutations(program: Program, index: int) -> Iterator[tuple[str, Program]]:
    """A program in which one argument of an operation is dropped, misnamed, or of another dtype or shape."""
    op = program.ops[index]
    schema = OPERATIONS[op.kind].schema

    def changed(**fields: Any) -> Program:
        return replace(program, ops=(*program.ops[:index], replace(op, **fields), *program.ops[index + 1 :]))

    def rerouted(part: str, argument: str, shape: tuple[int, ...], dtype: torch.dtype) -> Program:
        spec = BufferSpec("mutated", shape, dtype, Role.STATE)
        made = changed(**{part: {**getattr(op, part), argument: "mutated"}})
        return replace(made, buffers={**program.buffers, "mutated": spec})

    for part in ("reads", "writes", "weights"):
        given = getattr(op, part)
        for argument in given:
            others = {name: value for name, value in given.items() if name != argument}
            last = (
                schema.argument(argument).count and part == "weights" and argument == max(given)
            )  # may be one too many
            if not (schema.argument(argument).optional or last) or argument in sum(schema.forms, ()):
                yield f"{part} without {argument}", changed(**{part: others})
            yield f"{part} with {argument} misnamed", changed(**{part: {**others, f"{argument}_": given[argument]}})
            if part == "weights":
                continue
            spec = program.buffers[given[argument]]
            wrong = torch.float16 if spec.dtype.is_floating_point else torch.int16
            yield f"{argument} as {wrong}", rerouted(part, argument, spec.shape, wrong)
            yield f"{argument} with an extent more", rerouted(part, argument, (*spec.shape, 7), spec.dtype)
    yield "an unknown parameter", changed(params={**op.params, "colour": 3})
    for name in op.params:
        yield f"{name} of another type", changed(params={**op.params, name: "7"})
        if schema.parameters[name].required:
            yield f"without {name}", changed(params={key: value for key, value in op.params.items() if key != name})


@pytest.mark.parametrize("name", ["llama+everything", later("gpt_oss"), "gpt_oss_mxfp4+alone"])
def test_mutated_programs_are_refused_and_the_operation_is_named(name: str, pairs: Mapping[str, Pair]) -> None:
    pair = pairs[name]
    seen, count = set(), 0
    for program in (pair.program(3 if pair.speculator else 0, 2), next(iter(build_prefills(pair.geometry).values()))):
        for index, op in enumerate(program.ops):
            if (op.kind, op.stage) in seen:
                continue
            seen.add((op.kind, op.stage))
            for what, mutated in mutations(program, index):
                with pytest.raises(ConfigError, match=rf"op {index} {op.kind}: "):
                    mutated.validate()
                    pytest.fail(f"{op.kind}: {what} passed")
                count += 1
    assert count > 300


Q: ArrayType = ((4, 6), torch.bfloat16)
SUM: ArrayType = ((4, 6), torch.float32)


@pytest.mark.parametrize(
    ("kind", "reads", "writes", "weights", "params", "message"),
    [
        ("add", {"a": Q}, {"out": Q}, (), {}, r"lacks argument b, declared as: read b float \[M, N\]"),
        ("add", {"a": Q, "b": SUM, "c": Q}, {"out": Q}, (), {}, "has no argument c; it has a, b, out"),
        ("add", {"a": Q, "b": SUM, "out": Q}, {}, (), {}, r"reads out, which is declared as: write out compute"),
        ("add", {"b": SUM}, {"out": Q, "a": Q}, (), {}, r"writes a, which is declared as: read a compute \[M, N\]"),
        (
            "add",
            {"a": Q, "b": SUM},
            {"out": SUM},
            (),
            {},
            r"argument out must be compute \[M, N\] where M = 4, N = 6, compute = bfloat16, found float32 \[4, 6\]",
        ),
        (
            "concat_norms",
            {"embedded": Q, "hidden": Q},
            {"out": Q, "normed_hidden": Q},
            ("embed_weight", "hidden_weight"),
            {"eps": 1e-5},
            r"argument out must be compute \[M, 2 \* N\] where M = 4, N = 6, .*found bfloat16 \[4, 6\]",
        ),
        ("rms_norm", {"x": Q}, {"out": Q}, (), {"eps": 1e-5}, "lacks argument weight, declared as: weight weight"),
        ("rms_norm", {"x": Q}, {"out": Q}, ("weight", "bias"), {"eps": 1.0}, "has no argument bias; it has x, weight"),
        ("rms_norm", {"x": Q}, {"out": Q}, ("weight",), {}, "lacks parameter eps"),
        ("rms_norm", {"x": Q}, {"out": Q}, ("weight",), {"eps": True}, "parameter eps must be float, got True"),
        ("rms_norm", {"x": Q}, {"out": Q}, ("weight",), {"eps": 1.0, "k": 1}, "has no parameter k; it has eps"),
        ("join_features", {"source0": Q, "source2": Q}, {"out": Q}, (), {}, "lacks argument source1"),
        ("join_features", {}, {"out": Q}, (), {}, "lacks argument source0"),
        ("join_features", {"source": Q}, {"out": Q}, (), {}, "has no argument source; it has source, out"),
        (
            "join_features",
            {"source0": Q, "source1": Q},
            {"out": Q},
            (),
            {},
            r"\[c, F \* Ht\] where c = 4, F = 2, Ht = 6",
        ),
        ("identity", {"x": Q}, {"out": SUM}, (), {}, r"must be any \[\*shape\] where shape = \[4, 6\], any = bfloat16"),
    ],
)
def test_every_kind_of_fault_is_named(
    kind: str,
    reads: dict[str, ArrayType],
    writes: dict[str, ArrayType],
    weights: tuple[str, ...],
    params: dict[str, object],
    message: str,
) -> None:
    builder = ProgramBuilder("p", OPERATIONS)
    names: dict[str, dict[str, str]] = {"reads": {}, "writes": {}}
    for part, given in (("reads", reads), ("writes", writes)):
        for argument, (shape, dtype) in given.items():
            names[part][argument] = builder.declare(BufferSpec(f"{argument}.", shape, dtype, Role.STATE))
    canonical = {name: f"{name}.weight" for name in weights}
    builder.emit(kind, Stage.PREFILL, **names, weights=canonical, **params)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"^p: op 0 {kind}: .*{message}"):
        builder.build()


def test_an_operation_that_does_not_exist_is_named() -> None:
    builder = ProgramBuilder("p", OPERATIONS)
    builder.emit("no_such_thing", Stage.PREFILL, reads={}, writes={})
    with pytest.raises(ConfigError, match="p: op 0 no_such_thing: no such operation"):
        builder.build()


@pytest.mark.parametrize("reads", [{"a": "s", "b": "f"}, {"a": "out", "b": "f"}])
def test_a_buffer_is_one_argument_of_what_writes_it(reads: dict[str, str]) -> None:
    builder = ProgramBuilder("p", OPERATIONS)
    for name, dtype in (("s", torch.bfloat16), ("f", torch.float32), ("out", torch.bfloat16)):
        builder.declare(BufferSpec(name, (2, 2), dtype, Role.STATE))
    builder.emit("add", Stage.PREFILL, reads=reads, writes={"out": "out"})
    if reads["a"] == "s":
        assert builder.build().ops[0].updates == ()
    else:
        with pytest.raises(ConfigError, match="writes a buffer that is also another of its arguments"):
            builder.build()


def test_forms_of_weights_are_exclusive(pairs: Mapping[str, Pair]) -> None:
    program = pairs["gpt_oss_mxfp4+alone"].program(0, 1)
    index, op = next((index, op) for index, op in enumerate(program.ops) if op.kind == "experts_down")
    assert set(op.weights) == {"blocks", "scales", "bias"}
    both = replace(op, weights={**op.weights, "weight": "w"})
    mutated = replace(program, ops=(*program.ops[:index], both, *program.ops[index + 1 :]))
    with pytest.raises(ConfigError, match="takes weights weight or blocks with scales, found blocks, scales, weight"):
        mutated.validate()


def test_updates_are_what_the_schema_says(pairs: Mapping[str, Pair]) -> None:
    ops = {op.kind: op for op in pairs["llama"].program(3, 2).ops}
    assert ops["assign_drafts"].updates == ("draft_nodes",)
    assert "draft_live" not in ops["commit"].updates and "lengths" in ops["commit"].updates
    assert ops["kv_write"].updates == tuple(ops["kv_write"].writes.values())
    assert ops["linear"].updates == ops["sample"].updates == ()


def test_extents_are_evaluated_and_solved() -> None:
    heads = parse("(H + 2 * G) * D")
    assert evaluate(heads, {"H": 4, "G": 2, "D": 8}) == 64
    assert evaluate(heads, {"H": 4, "G": 2}) is None
    assert solve(heads, 64, {"H": 4, "D": 8}) == {"G": 2}
    assert solve(heads, 72, {"H": 4, "D": 8}) is None, "no whole number of groups"
    assert solve(heads, 64, {"D": 8}) == {}, "two unknowns"
    assert solve(heads, 16, {"H": 4, "D": 8}) is None, "less than nothing"
    assert evaluate(parse("N / 32"), {"N": 64}) == 2 and evaluate(parse("N / 32"), {"N": 65}) == -1
    assert solve(parse("N / 32"), 2, {}) == {"N": 64}
    for text in ("M - 1", "f(M)", "1.5", "M +", "M[0]"):
        with pytest.raises(ValueError, match="extent"):
            parse(text)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("read  x  float32", "cannot read"),
        ("read  x  float33  [M]", "float33 is no dtype"),
        ("read  y  float32  [M]", "y is no parameter of the function"),
        ("write  out  float32  [M]", "x has no line in its table"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_where_it_stands(table: str, message: str) -> None:
    def copy(x: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(x)

    with pytest.raises(ValueError, match=f"copy: .*{message}"):
        operation(table)(copy)
    assert "copy" not in OPERATIONS and not operations_of(inspect.getmodule(copy))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_an_identity_anywhere_changes_nothing(name: str, pairs: Mapping[str, Pair]) -> None:
    """A step by its references: every buffer has the bits that it had, and the tokens and drafts are there."""
    program = pairs[name].program(3, 2)
    changed = with_identities(program, 60, seed=3)
    assert len(changed.ops) - len(program.ops) > 30
    plain, found = (run(each, pairs[name]) for each in (program, changed))
    different = [key for key, tensor in plain.items() if not torch.equal(found[key].nan_to_num(), tensor.nan_to_num())]
    assert not different
    assert int(plain["lengths"][1]) == 4 and int(plain["num_drafts"][1]) > 0


def run(program: Program, pair: Pair) -> BufferSet:
    """The buffers after one step with one slot."""
    buffers = BufferSet(program.specs(*Role), torch.device("cpu"), program.constants)
    buffers["active"][1] = 1
    buffers["lengths"].fill_(3)
    buffers["tokens"][:, :3] = torch.tensor([5, 7, 11])
    buffers["slot_ints"][:, 1] = 100
    buffers["block_table"][1, :4] = torch.arange(1, 5)
    weights = {name: each.float() if each.is_floating_point() else each for name, each in pair.source.items()}
    with torch.inference_mode():
        for _, function, arguments in bind(program, buffers, weights):
            function(**arguments)
    return buffers
