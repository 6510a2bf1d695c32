"""Programs with copies put in between: operations that mean nothing, and must change nothing."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

from lowlat.graphs import Role
from lowlat.graphs.program import Op, Program


def with_identities(program: Program, count: int, seed: int) -> Program:
    """The program with `count` operations `identity`, each after a random operation: it copies a scratch buffer that
    the operation overwrote, and the copy is read in its place until the buffer is written again."""
    places = Random(seed).sample(range(len(program.ops)), min(count, len(program.ops)))
    buffers = dict(program.buffers)
    ops: list[Op] = []
    copies: dict[str, str] = {}  # buffers that are read through their copy
    for index, op in enumerate(program.ops):
        moved = replace(op, reads=_renamed(op.reads, copies))
        ops.append(moved)
        for name in op.writes.values():
            copies.pop(name, None)
        names = [name for name in op.writes.values() if name not in op.updates]
        scratch = [name for name in names if program.buffers[name].role is Role.SCRATCH]
        if index in places and scratch:
            name = scratch[index % len(scratch)]
            copy = f"{name}.copy.{index}"
            buffers[copy] = replace(buffers[name], name=copy)
            ops.append(Op("identity", op.stage, MappingProxyType({"x": name}), MappingProxyType({"out": copy}), {}, {}))
            copies[name] = copy
    made = replace(program, ops=tuple(ops), buffers=MappingProxyType(buffers))
    made.validate()
    return made


def _renamed(arguments: Mapping[str, str], copies: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({argument: copies.get(name, name) for argument, name in arguments.items()})
