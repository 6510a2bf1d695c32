"""The gated delta rule of a tile of rows as products of matrices, written out for one warp.

S is a head's state before the tile, Dk x columns; k and q are its rows' keys and queries of norm 1, q scaled; decay and
beta are its rows' gates. With g_t the product of the decays up to row t and p_ts that of those after s up to t:

    A_ts = beta_t p_ts (k_s k_t), s < t;   T = (1 + A)^-1 diag(beta);   M_ts = p_ts (q_t k_s), s <= t
    d = T (v - g K S);   o = g Q S + M d;   S after = g_last S + sum over s of p_last,s k_s d_s^T

Keys and queries are the bf16 numbers that the convolution gave: what divides them by their norms is part of the gates.
The other factor of each product is a sum of two bf16, its rounded value and the rounded rest, so a product has 16 bits
or more. A warp has 16 columns of a state in registers, as the sums of products of 16 columns by 8 rows of S: a lane has
columns g and g + 8 and rows 2 t and 2 t + 1, g its quarter and t its place there. Such sums are a first factor as they
stand.
"""

from collections.abc import Sequence
from typing import Any

__all__ = [
    "FRAGMENT_BYTES",
    "GATES_AT",
    "LOWER",
    "PITCH",
    "TILE",
    "TILE_BYTES",
    "advance_tile",
    "load_state",
    "product_of_rows",
    "solve_tile",
    "store_state",
    "write_fragments",
]

TILE = 32  # rows
TILES = TILE // 8  # tiles of 8 columns of a product that has a tile's rows as columns
# of T and M the blocks of 8 rows and 16 columns that are not above the diagonal
LOWER = ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1))
FRAGMENT_BYTES = 512  # of a block: its numbers rounded, two words a lane, and what is left of them
GATES_AT = 2 * len(LOWER) * FRAGMENT_BYTES  # after T and M: for two rows 8 floats each, see `solve_tile`
TILE_BYTES = GATES_AT + TILE * 16  # what a tile brings to a value head
PITCH = 4 * (TILE + 8)  # bytes of a row of a matrix [TILE, TILE] of float32 in shared memory: no two rows on one bank


def _split(ops: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Two floats as two pairs of bf16, rounded and what is left."""
    word = ops.pair(first, second)
    return word, ops.pair(ops.sub(first, ops.low(word)), ops.sub(second, ops.high(word)))


def _first_factors(ops: Any, sums: Sequence[Any], block: int) -> tuple[list[Any], list[Any]]:
    """Tiles 2 * block and 2 * block + 1 of sums as a first factor of 16 x 16: rounded, and what is left."""
    own = sums[8 * block : 8 * block + 8]
    pairs = [_split(ops, own[place], own[place + 1]) for place in range(0, 8, 2)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def load_state(ops: Any, address: Any, is_there: Any, dim: int, halves: int) -> list[Any]:
    """A lane's numbers of a state [columns, dim] in global memory, from its first.

    They are zeros where the word `is_there` is 0, and for columns g + 8 of a warp that has 8, one half.
    """
    zeros = [ops.number(0.0)] * 2
    numbers: list[Any] = []
    for tile in range(dim // 8):
        for half in range(2):
            at = 32 * dim * half + 32 * tile
            numbers += ops.load_global_two_if(address, at, is_there) if half < halves else zeros
    return numbers


def store_state(ops: Any, address: Any, state: Sequence[Any], whole: Any, dim: int, halves: int) -> None:
    """Store what `load_state` loads, or NaN where the word `whole` is 0."""
    is_nan, nan = ops.below(whole, 1), ops.number(float("nan"))
    numbers = [ops.select(is_nan, nan, each) for each in state]
    for tile in range(dim // 8):
        for half in range(halves):
            place = 4 * tile + 2 * half
            ops.store_global_two(address, 32 * dim * half + 32 * tile, numbers[place], numbers[place + 1])


def advance_tile(
    ops: Any,
    state: Sequence[Any],
    rows: Any,
    turned: Any,
    values: Any,
    fragments: Any,
    gates: Any,
    out: Any,
    index: Any,
    limit: Any,
    *,
    dim: int,
    stride: int,
    value_stride: int,
    halves: int,
    out_stride: int,
) -> list[Any]:
    """The state after a tile's rows, whose outputs are stored.

    rows, turned  a lane's shared addresses of the keys, as `matrices` takes them as they are and transposed; queries
                  are TILE rows after them
    values        likewise, of the columns' values, transposed
    fragments     of T and M, and gates: its own of `solve_tile`'s
    out           global address of the lane's first output, row g of the tile
    index, limit  words: outputs of rows g, g + 8 and so on are stored where index + 0, 8 and so on is below limit
    """
    seen, read = [[ops.number(0.0)] * 4 for _ in range(TILES)], [[ops.number(0.0)] * 4 for _ in range(TILES)]
    for wide in range(dim // 32):
        keys = [ops.matrices(rows, 8 * tile * stride + 64 * wide) for tile in range(TILES)]
        queries = [ops.matrices(rows, (TILE + 8 * tile) * stride + 64 * wide) for tile in range(TILES)]
        for half in range(2):
            words = slice(2 * half, 2 * half + 2)
            for factor in _first_factors(ops, state, 2 * wide + half):
                for tile in range(TILES):
                    seen[tile] = ops.mma(seen[tile], factor, keys[tile][words])
                for tile in range(TILES):
                    read[tile] = ops.mma(read[tile], factor, queries[tile][words])
    rests = []
    for pair in range(TILES // 2):
        found = ops.matrices(values, 16 * pair * value_stride, transposed=True)
        for place in range(2):
            tile = 2 * pair + place
            of_seen0, of_seen1, of_read0, of_read1 = map(ops.float_of, ops.load_128(gates, 128 * tile))
            low, high = found[2 * place : 2 * place + 2]
            given = (ops.low(low), ops.high(low), ops.low(high), ops.high(high))
            shares = [ops.negated(each) for each in (of_seen0, of_seen1)] * 2
            rests += [ops.fma(*each) for each in zip(shares, seen[tile], given, strict=True)]
            read[tile] = [ops.mul(*each) for each in zip((of_read0, of_read1) * 2, read[tile], strict=True)]
    corrections = _multiply_lower(ops, [[ops.number(0.0)] * 4 for _ in range(TILES)], rests, fragments, 0)
    scaled, total = [], ops.number(0.0)
    for tile in range(TILES):
        left0, left1, total, _ = map(ops.float_of, ops.load_128(gates, 128 * tile + 16))
        scaled += [
            ops.mul(*each) for each in zip((left0, left1) * 2, corrections[4 * tile : 4 * tile + 4], strict=True)
        ]
    after = _update(ops, [ops.mul(total, each) for each in state], scaled, turned, dim, stride)
    outputs = _multiply_lower(ops, read, corrections, fragments, len(LOWER) * FRAGMENT_BYTES)
    for tile in range(TILES):
        own = ops.plus(index, 8 * tile)
        for half in range(halves):
            place = 4 * tile + 2 * half
            word = ops.transposed(ops.pair(outputs[place], outputs[place + 1]))
            ops.store_global_below(out, 8 * tile * out_stride + 16 * half, word, own, limit)
    return after


def _multiply_lower(ops: Any, sums: list[list[Any]], numbers: Sequence[Any], fragments: Any, offset: int) -> list[Any]:
    """Sums plus the products of numbers, 16 columns by TILE rows, by T or M; flat."""
    factors = [_first_factors(ops, numbers, block) for block in range(2)]
    blocks = [ops.load_128(fragments, offset + FRAGMENT_BYTES * place) for place in range(len(LOWER))]
    for left, rest in ((1, 0), (0, 1), (0, 0)):  # one factor after another, so that no product waits for the one before
        for (tile, block), words in zip(LOWER, blocks, strict=True):
            sums[tile] = ops.mma(sums[tile], factors[block][left], words[2 * rest : 2 * rest + 2])
    return [each for four in sums for each in four]


def _update(ops: Any, state: Sequence[Any], scaled: Sequence[Any], turned: Any, dim: int, stride: int) -> list[Any]:
    """A state plus the products of scaled corrections by keys."""
    sums = [list(state[4 * tile : 4 * tile + 4]) for tile in range(dim // 8)]
    factors = [_first_factors(ops, scaled, block) for block in range(2)]
    for first in range(0, dim // 16, 4):  # 8 sums side by side
        for block in range(2):
            found = []
            for wide in range(first, min(first + 4, dim // 16)):
                words = ops.matrices(turned, 16 * block * stride + 32 * wide, transposed=True)
                found += [(2 * wide, words[:2]), (2 * wide + 1, words[2:])]
            for factor in factors[block]:
                for tile, words in found:
                    sums[tile] = ops.mma(sums[tile], factor, words)
    return [each for four in sums for each in four]


def product_of_rows(ops: Any, first: Any, second: Any, *, dim: int, stride: int) -> list[Any]:
    """Products of 16 rows by TILE rows over dim numbers: 4 tiles of 8 columns, a lane's sums of each.

    first, second  a lane's shared addresses, as `matrices` takes them: of 16 rows by 16 numbers, of 8 rows by 32
    """
    sums = [[ops.number(0.0)] * 4 for _ in range(TILES)]
    for wide in range(dim // 32):
        others = [ops.matrices(second, 8 * tile * stride + 64 * wide) for tile in range(TILES)]
        for half in range(2):
            factor = ops.matrices(first, 64 * wide + 32 * half)
            for tile in range(TILES):
                sums[tile] = ops.mma(sums[tile], factor, others[tile][2 * half : 2 * half + 2])
    return [each for four in sums for each in four]


def solve_tile(
    ops: Any, barrier: Any, products: Any, rows: Any, matrices: Any, column: Any, lane: Any, key: Any, beta: Any
) -> list[Any]:
    """T and M of a tile in shared memory; of the lane's row s it gives g_s, p_last,s and g_last.

    barrier    of the warp, by its number
    products   shared address of k_t k_s [TILE, TILE] in column s, keys as they are; q_t k_s follow them
    rows       of 4 floats a row t: decay, beta over the norm of k, what q is multiplied by, nothing
    matrices   of T, and M after it; column: of their column s
    key, beta  1 / the norm of the lane's key, and its beta
    """
    one, zero = ops.number(1.0), ops.number(0.0)
    between, before, total = one, one, one
    for row in range(TILE):
        decay, share, scale, _ = map(ops.float_of, ops.load_128(rows, 16 * row))
        is_earlier = ops.below(lane, row)
        between = ops.mul(between, ops.select(is_earlier, decay, one))
        before = ops.mul(before, ops.select(is_earlier, one, decay))
        total = ops.mul(total, decay)
        weight = ops.mul(between, key)
        seen = ops.mul(ops.mul(ops.load_float(products, PITCH * row), share), weight)
        read = ops.mul(ops.mul(ops.load_float(products, PITCH * (TILE + row)), scale), weight)
        ops.store_float(column, PITCH * row, ops.select(is_earlier, ops.negated(seen), zero))
        ops.store_float(column, PITCH * (TILE + row), ops.select(ops.below(lane, row + 1), read, zero))
    ops.sync(barrier)
    solved: list[Any] = []  # the lane's column of (1 + A)^-1
    for row in range(TILE):
        value = ops.select(ops.below(lane, row), zero, ops.select(ops.below(lane, row + 1), one, zero))
        for first in range(0, row, 4):
            words = ops.load_128(matrices, PITCH * row + 4 * first)
            for word, known in zip(words, solved[first:], strict=False):
                value = ops.fma(ops.float_of(word), known, value)
        solved.append(value)
    ops.sync(barrier)
    for row, value in enumerate(solved):
        ops.store_float(column, PITCH * row, ops.mul(value, beta))
    ops.sync(barrier)
    return [before, between, total]


def write_fragments(ops: Any, source: Any, target: Any) -> None:
    """Write T and M as second factors: of each block in LOWER a lane's numbers rounded to bf16, and what is left.

    source  shared address of the lane's first numbers, in row g and column 2 t
    target  global address of its first words
    """
    for matrix in range(2):
        for place, (tile, block) in enumerate(LOWER):
            at = PITCH * (TILE * matrix + 8 * tile) + 64 * block
            pairs = [_split(ops, *map(ops.float_of, ops.load_64(source, at + 32 * part))) for part in range(2)]
            words = (pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])
            ops.store_global_four(target, FRAGMENT_BYTES * (len(LOWER) * matrix + place), words)
