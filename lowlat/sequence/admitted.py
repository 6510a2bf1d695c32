"""This module has the record of a request that holds blocks of the first pool, and checks that all blocks balance."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lowlat.sequence.chunk_moves import ChunkMoves
from lowlat.sequence.prefix_chains import PrefixChain
from lowlat.sequence.prefix_index import CachedChunk
from lowlat.sequence.shared_chunks import SharedChunks

__all__ = ["Admitted", "block_problems", "table_problems"]


@dataclass(eq=False, slots=True)
class Admitted:
    """One admitted request.

    digests  the digests of its chunks so far
    held     its chunks that are or were listed, by number
    tainted  it read KV of a poisoned request: none of its chunks is shared any more
    chain    the digests of its prompt's chunks; None: the prompt may change
    """

    prompt: Sequence[int]
    table: list[int]
    num_reserved: int
    num_prefilled: int
    root: bytes
    digests: list[bytes] = field(default_factory=list)
    held: dict[int, CachedChunk] = field(default_factory=dict)
    tainted: bool = False
    chain: PrefixChain | None = None

    @property
    def num_known(self) -> int:
        """Tokens that prefill may read now; a request whose prompt grows may wait before its last token."""
        return len(self.prompt) - (not isinstance(self.prompt, tuple))


def table_problems(entries: Mapping[str, Admitted], chunks: SharedChunks, moves: ChunkMoves) -> Iterator[str]:
    """Describe faults of requests' tables and of the chunks' counts of users; yields nothing if all is sound."""
    users: Counter[int] = Counter({id(chunk): count for chunk, count in moves.moving.items()})
    known = {id(chunk): chunk for chunk in (*chunks.index, *moves.moving)}
    for request_id, entry in entries.items():
        table = entry.table
        if 0 in table or len(set(table)) != len(table):
            yield f"the table of request {request_id} holds the null block or a block twice"
        if len(table) != entry.num_reserved:
            yield f"request {request_id} reserved {entry.num_reserved} blocks, holds {len(table)}"
        for k, chunk in entry.held.items():
            users[id(chunk)] += 1
            known[id(chunk)] = chunk
            if tuple(chunks.blocks_of(table, k)) != chunk.blocks:
                yield f"chunk {k} of request {request_id} is not at its place in the table"
    for key, chunk in known.items():
        if chunk.num_users != users[key]:
            yield f"blocks {chunk.blocks}: {chunk.num_users} users, {users[key]} tables hold them"


def block_problems(entries: Mapping[str, Admitted], chunks: SharedChunks, moves: ChunkMoves) -> Iterator[str]:
    """Describe faults of blocks: each must have one state, and tables may share a block only through one chunk."""
    pool = chunks.pool
    states = Counter(pool.free) + Counter(pool.to_clear)
    cached = {id(chunk): chunk for chunk in (*chunks.index, *moves.moving)}
    for entry in entries.values():
        cached.update((id(chunk), chunk) for chunk in entry.held.values())
        through_chunks = {block for chunk in entry.held.values() for block in chunk.blocks}
        states.update(block for block in entry.table if block not in through_chunks)
    for chunk in cached.values():
        states.update(chunk.blocks)
    yield from (
        f"block {block} has {states[block]} states" for block in range(1, pool.num_blocks) if states[block] != 1
    )
    if states.total() != pool.capacity or states[0]:
        yield f"{states.total()} blocks are accounted for, {pool.capacity} exist"
    if pool.dirty.intersection(pool.free):
        yield f"blocks {sorted(pool.dirty.intersection(pool.free))} are free but not cleared"
