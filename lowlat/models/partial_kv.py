"""This module computes SpecPV's sizes: the part of a KV cache that layers without windows attend to.

A slot in the partial state has, for each such layer and key-value head, a list of blocks: the text's first ones
(sinks), those that the last queries scored best, and all from the last ones (the window) on, to which steps append.
Position p of the window is at position p - `shift` in the list. Partial steps attend to a part of the cache, so the
keys and values that they write are inexact. A refresh recomputes these over the whole cache, and chooses the blocks
anew. By default SpecPV is lossy: tokens accepted between two refreshes are not verified again. Lossless SpecPV treats
the tokens of partial steps as proposals: a step over the whole cache verifies them as drafts, and recomputes their keys
and values.

Source: SpecPV, arXiv 2512.02337, and its authors' TanZhendong/SpecPV, specpv/kv/kv_cache.py. They copy the part, end
the window at the position, and score by the root and its drafts. Here blocks stay in place, the window begins with a
block, and the scores come from the last tokens before a step, which are certain.
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

AGREEMENT = 0.97  # assumed share of a partial step's tokens that a step over the whole cache gives, too
GRAIN = 1024  # positions: lossless SpecPV begins at a multiple of it
# tokens: with Llama-3.1-8B's shape lossy SpecPV gained there and lost at 16384 (bench/notes/long-contexts.md)
LOSSY_FROM = 32768
LOSSLESS_FROM = 4096  # tokens: the search for the length from which lossless SpecPV pays begins here
# costs of steps beyond reading all bytes once, on an H200: bench/notes/long-contexts.md
QUERY_ROWS = 32  # rows of a key-value head that share a reading of keys and values
KV_COST = 1.25  # of a byte of keys and values, relative to a byte of weights
FREE_ROWS, ROWS_A_READING = 16, 35  # the first rows of a step cost nothing more; then so many cost as all weights
CYCLE_COST = 1.13  # factor of a cycle's time, since the host reads the proposals before they are verified
BUFFERS = (11, 15, 23, MAX_FORCED)  # numbers of proposals that are compared if the options name none


@dataclass(frozen=True)
class PartialKV:
    """The sizes of partial steps.

    block              positions of a block of a list
    num_sinks          blocks at the start
    num_retrieved      blocks that each head chooses
    num_window         the least number of whole blocks before the last position
    num_queries        the most last rows of a refresh that score blocks
    buffer             positions that partial steps may write between two refreshes
    threshold          positions from which a slot is in the partial state; more than a list has at the start
    num_refresh_steps  the most partial steps between two refreshes; lossless SpecPV finishes the cycle first
    lossless           whether partial steps' tokens are proposals, which are verified before the buffer is full
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
        """Positions that lists leave out if chosen after `num_positions` exact ones; above 0 from the threshold on."""
        first_of_window = num_positions // self.block - self.num_window
        return (first_of_window - self.num_sinks - self.num_retrieved) * self.block


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a runtime's steps read.

    weights   bytes of the target's weights, which every step reads
    drafts    bytes that the draft model reads for a step's drafts
    position  bytes of keys and values for one position of a slot, in layers without windows
    slots     the number of decoding slots
    group     the most query heads of a key-value head
    """

    weights: float
    drafts: float
    position: float
    slots: int
    group: int

    def step(self, positions: float, rows: int, readings: int = 1) -> float:
        """The cost of a step with `rows` rows and `positions` positions a slot, in bytes of weights.

        readings  how often it reads all keys and values
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
    """The factor by which cycles of partial steps and a verification are faster than steps over the whole cache.

    agreement      the probability that a proposal after accepted ones is accepted; the verification brings one more
                   token
    tokens_a_step  tokens that a step of either kind brings
    partial, verification, refresh, full  times, in one unit, of a partial step, a verification, the refreshes of all
                   slots, and a step over the whole cache
    """
    held = sum(agreement**place for place in range(sizes.buffer + 1))
    steps = sizes.buffer / tokens_a_step
    refreshes = 1 / max(1, ceil(sizes.num_refresh_steps / steps))
    cycle = steps * partial + verification + refreshes * refresh
    return held / cycle * full / tokens_a_step


def lossless_gain(sizes: PartialKV, positions: int, reads: StepBytes) -> float:
    """The factor by which lossless SpecPV should be faster than steps over the whole cache, estimated by bytes.

    positions  the context's length
    Assumptions: a step brings one token and half of its drafts; n proposals are all accepted with probability
    AGREEMENT ** n; attention reads keys and values once for every QUERY_ROWS rows of queries.
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
    """Set the threshold from which lossless SpecPV pays by bytes, with all slots decoding. Raises ConfigError."""
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
    """Compute SpecPV's sizes for a runtime; None if it is off.

    max_rows      rows that a step may write for a slot
    weight_bytes  of the target
    draft_bytes   of the draft model, each of whose passes reads all of them
    Unless the options give a threshold, lossless SpecPV begins at the length from which it pays by these bytes, and
    lossy SpecPV at LOSSY_FROM. Raises ConfigError for options that cannot be combined with it, or with which no partial
    step would run.
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
