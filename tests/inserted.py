"""Programs with identities put in at random places: what read a buffer reads its copy."""

import random
from dataclasses import replace

from lowlat.graphs import BufferSpec, Role
from lowlat.program.program import Op, Program

__all__ = ["with_identities"]

ROLES = (Role.SCRATCH, Role.STATE, Role.CONSTANT)


def with_identities(program: Program, seed: int, count: int = 12, most_bytes: int = 1 << 22) -> Program:
    """The program with up to `count` more operations, each a copy of one buffer for one of its readers."""
    chosen, ops, buffers = random.Random(seed), list(program.ops), dict(program.buffers)
    for number in range(count):
        place = chosen.randrange(len(ops))
        op = ops[place]
        readable = [
            argument
            for argument, name in op.reads.items()
            if buffers[name].role in ROLES and buffers[name].num_bytes <= most_bytes and name not in op.writes.values()
        ]
        if op.kind == "identity" or not readable:
            continue
        argument = chosen.choice(readable)
        source = buffers[op.reads[argument]]
        copy = BufferSpec(f"copy.{number}", source.shape, source.dtype, Role.SCRATCH)
        buffers[copy.name] = copy
        ops[place] = replace(op, reads={**op.reads, argument: copy.name})
        ops.insert(place, Op("identity", op.stage, {"x": source.name}, {"out": copy.name}, {}, {}))
    changed = replace(program, ops=tuple(ops), buffers=buffers)
    changed.validate()
    return changed
