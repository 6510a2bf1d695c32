"""This module sizes SpecPV: the part of a KV cache that layers without windows attend to.

A slot in the partial state has, for each such layer and key-value head, a list of blocks: the text's first ones
(sinks), those that the last queries scored best, and all from the last ones (the window) on, to which steps append.
Position p of the window's part stands `shift` positions before p in the list. What steps write is made from a part of
the cache and so inexact; a refresh recomputes it over all of the cache, and chooses the blocks from it. SpecPV is
lossy: what was accepted between two refreshes is not verified again. Where it is lossless the tokens of partial steps
are proposals: a step over all of the cache verifies them as drafts, and recomputes their keys and values.

Source: SpecPV, arXiv 2512.02337, and its authors' TanZhendong/SpecPV, specpv/kv/kv_cache.py. They copy the part, take
its window to the position, score by the root and its drafts; here blocks stay where they are, the window begins with a
block, and the last tokens before a step score, which are certain.
"""

from dataclasses import dataclass, replace
from math import ceil

from lowlat.errors import ConfigError
from lowlat.kernels.reference.step.slots import MAX_FORCED
from lowlat.models.geometry import ModelConfig
from lowlat.models.prefill_chunks import most_prefill_chunks
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig

__all__ = ["LOSSY_FROM", "PartialKV", "StepBytes", "cycle_gain", "lossless_gain", "partial_kv"]

AGREEMENT = 0.97  # of a partial step's tokens, the share that a step over all of the cache gives, too: assumed
GRAIN = 1024  # positions: lossless SpecPV begins at a multiple
# tokens: with Llama-3.1-8B's shape lossy SpecPV gained there and lost at 16384 (bench/notes/long-contexts.md)
LOSSY_FROM = 32768
LOSSLESS_FROM = 4096  # tokens: where lossless SpecPV pays is looked for from here on
# what steps take next to a reading of all bytes, on an H200: bench/notes/long-contexts.md
QUERY_ROWS = 32  # of a key-value head, that share a reading of keys and values
KV_COST = 1.25  # of a byte of keys and values, where one of weights costs 1
FREE_ROWS, ROWS_A_READING = 16, 35  # so many rows of a step cost no more, so many others as much as all weights
CYCLE_COST = 1.13  # of a cycle: the host reads what was proposed before it is verified
BUFFERS = (11, 15, 23, MAX_FORCED)  # proposals of a cycle that are weighed where none are asked for


@dataclass(frozen=True)
class PartialKV:
    """The sizes of partial steps.

    block              positions of a block of a list
    num_sinks          blocks at the start
    num_retrieved      blocks that each head chooses
    num_window         whole blocks before the last position, at least
    num_queries        last rows of a refresh that score blocks, at most
    buffer             positions that partial steps may write between two refreshes
    threshold          positions from which a slot is in the partial state, and more than a list has at the start
    num_refresh_steps  partial steps between two refreshes, at most; where it is lossless to the end of a cycle
    lossless           what partial steps write is proposed, and verified before the buffer is full
    """

    block: int
    num_sinks: int
    num_retrieved: int
    num_window: int
    num_queries: int
    buffer: int
    threshold: int
    num_refresh_steps: int
    lossless: bool = False

    def shift(self, num_positions: int) -> int:
        """Positions that lists leave out when chosen after so many exact ones; above 0 from the threshold on."""
        first_of_window = num_positions // self.block - self.num_window
        return (first_of_window - self.num_sinks - self.num_retrieved) * self.block


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a runtime's steps read.

    weights   bytes of the target's, which every step reads
    drafts    bytes that the draft model reads for a step's drafts
    position  bytes of keys and values of a slot's position, of layers without windows
    slots     that decode
    group     query heads of a key-value head, at most
    """

    weights: float
    drafts: float
    position: float
    slots: int
    group: int

    def step(self, positions: float, rows: int, readings: int = 1) -> float:
        """The cost of a step with so many rows and positions a slot, in bytes of weights.

        readings  of all keys and values
        """
        cost = 1 + max(0, self.slots * rows - FREE_ROWS) / ROWS_A_READING
        return cost * self.weights + self.drafts + readings * self.slots * positions * self.position * KV_COST


def cycle_gain(
    sizes: PartialKV,
    agreement: float,
    tokens_a_step: float,
    *,
    partial: float,
    verification: float,
    refresh: float,
    full: float,
) -> float:
    """By what factor cycles of partial steps and a verification are faster than steps over all of the cache.

    agreement      the chance that a proposal after right ones is right; the verification brings one token more
    tokens_a_step  that a step brings, of either kind
    partial, verification, refresh, full  what a partial step, a verification, the refreshes of all slots and a step
                   over all of the cache take, in one unit
    """
    held = sum(agreement**place for place in range(sizes.buffer + 1))
    steps = sizes.buffer / tokens_a_step
    refreshes = 1 / max(1, ceil(sizes.num_refresh_steps / steps))
    cycle = steps * partial + verification + refreshes * refresh
    return held / cycle * full / tokens_a_step


def lossless_gain(sizes: PartialKV, positions: int, reads: StepBytes) -> float:
    """By what factor lossless SpecPV should be faster than steps over all of the cache, by bytes, at a context.

    A step is taken to bring a token and half of its drafts, n proposals to be right with chance AGREEMENT ** n, and
    attention to read keys and values once for so many rows of queries as share a reading.
    """
    listed = min(positions, (sizes.num_sinks + sizes.num_retrieved + sizes.num_window) * sizes.block)
    rows, verified = sizes.num_queries, sizes.buffer + 1
    alone = replace(reads, drafts=0.0, slots=1)
    gain = cycle_gain(
        sizes,
        AGREEMENT,
        tokens_a_step=1 + (rows - 1) / 2,
        partial=reads.step(listed, rows),
        verification=reads.step(positions, verified, -(-verified * reads.group // QUERY_ROWS)),
        refresh=reads.slots * alone.step(positions, rows),
        full=reads.step(positions, rows),
    )
    return gain / CYCLE_COST


def _begin_lossless(sizes: PartialKV, options: RuntimeConfig, reads: StepBytes) -> PartialKV:
    """The sizes with the threshold from which lossless SpecPV pays by bytes, with all slots decoding."""
    for positions in range(-(-sizes.threshold // GRAIN) * GRAIN, options.max_context, GRAIN):
        if lossless_gain(sizes, positions, reads) > 1:
            return replace(sizes, threshold=positions)
    raise ConfigError(
        f"specpv_lossless: by bytes it is slower than steps over all of the cache up to max_context "
        f"{options.max_context} with max_batch {options.max_batch}; specpv_partial_threshold begins it sooner all the "
        "same"
    )


def partial_kv(
    speculative: SpeculativeConfig,
    options: RuntimeConfig,
    config: ModelConfig,
    max_rows: int,
    weight_bytes: float = 0.0,
    draft_bytes: float = 0.0,
) -> PartialKV | None:
    """SpecPV's sizes for a runtime; None where it is off.

    max_rows      rows that a step may write for a slot
    weight_bytes  of the target: lossless SpecPV begins where it pays, unless a threshold is given; lossy SpecPV
                  begins at LOSSY_FROM
    draft_bytes   of the draft model, each of whose passes reads all
    Raises ConfigError for options that cannot be combined with it, or that never let a partial step run.
    """
    if not speculative.enable_specpv:
        return None
    block, is_lossless = speculative.specpv_block_size, speculative.specpv_lossless
    given = speculative.specpv_partial_threshold
    begin = given if given is not None else LOSSLESS_FROM if is_lossless else LOSSY_FROM
    fixed = speculative.specpv_n_sink_blocks + speculative.specpv_n_retrieval_blocks
    least = (fixed + speculative.specpv_n_window_blocks + 1) * block
    found = PartialKV(
        block=block,
        num_sinks=speculative.specpv_n_sink_blocks,
        num_retrieved=speculative.specpv_n_retrieval_blocks,
        num_window=speculative.specpv_n_window_blocks,
        num_queries=speculative.num_speculative_tokens + 1,
        buffer=speculative.specpv_n_spec_tokens_buf,
        threshold=max(begin, least),
        num_refresh_steps=speculative.specpv_full_refresh_steps,
        lossless=is_lossless,
    )
    reads = _step_bytes(config, options, weight_bytes, draft_bytes * speculative.num_speculative_tokens)
    if found.lossless and found.buffer == SpeculativeConfig.specpv_n_spec_tokens_buf:
        sizes = [replace(found, buffer=buffer) for buffer in BUFFERS if buffer > max_rows or buffer == MAX_FORCED]
        found = max(sizes, key=lambda each: lossless_gain(each, options.max_context, reads))
    _check(found, options, config, max_rows)
    if found.lossless and given is None:
        return _begin_lossless(found, options, reads)
    return found


def _step_bytes(config: ModelConfig, options: RuntimeConfig, weight_bytes: float, drafts: float) -> StepBytes:
    itemsize = 1 if config.coded_kv is not None else 2 if config.dtype == "bfloat16" else 4
    listed = [spec for spec in config.attentions.values() if spec.window is None]
    position = sum(2 * spec.kv_size for spec in listed) * itemsize
    group = max((spec.num_heads // spec.num_kv_heads for spec in listed), default=1)
    return StepBytes(weight_bytes, drafts, position, options.max_batch, group)


def _check(partial: PartialKV, options: RuntimeConfig, config: ModelConfig, max_rows: int) -> None:
    chunk = options.prefill_chunk
    at_once = chunk * most_prefill_chunks(config, chunk, options.max_prefill_chunks)
    problems = (
        (
            len(config.caching) < len(config.attentions),
            "layers of this model read other layers' keys and values, of which they would choose other blocks",
        ),
        (None not in config.windows, "it has nothing to leave out: every layer of this model has a window"),
        (
            options.block_size % partial.block > 0,
            f"block_size {options.block_size} must be a multiple of specpv_block_size {partial.block}",
        ),
        (
            options.share_decoded,
            "share_decoded would hand the keys and values of partial steps, which are inexact, to other requests",
        ),
        (
            partial.buffer <= max_rows,
            f"specpv_n_spec_tokens_buf {partial.buffer} must be above {max_rows}, the rows that a step may write",
        ),
        (
            partial.lossless and partial.buffer > MAX_FORCED,
            f"specpv_n_spec_tokens_buf {partial.buffer} exceeds {MAX_FORCED}, the proposals that a step can verify "
            "(specpv_lossless)",
        ),
        (
            partial.buffer > at_once,
            f"specpv_n_spec_tokens_buf {partial.buffer} exceeds {at_once}, the positions that a refresh recomputes at "
            "once (prefill_chunk times max_prefill_chunks)",
        ),
        (
            options.max_context <= partial.threshold,
            f"max_context {options.max_context} never reaches {partial.threshold} tokens, from which on steps are "
            "partial (specpv_partial_threshold, and a block more than sinks, retrieval and window have)",
        ),
    )
    for is_problem, text in problems:
        if is_problem:
            raise ConfigError(f"enable_specpv: {text}")
