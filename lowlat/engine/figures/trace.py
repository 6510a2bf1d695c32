"""This module logs steps, acceptance, KV and trees on the logger `lowlat.trace`, if a user asks for it."""

import logging
from collections.abc import Sequence

from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.executors import Executor
from lowlat.graphs import Bucket
from lowlat.options.runtime import TraceConfig
from lowlat.sequence.kvcache import KVCache

__all__ = ["Tracer"]

logger = logging.getLogger("lowlat.trace")


class Tracer:
    """Logs each step, for the parts that are switched on."""

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._steps = 0

    @classmethod
    def from_config(cls, config: TraceConfig) -> "Tracer | None":
        """A tracer, or None when nothing is to be traced."""
        return cls(config) if config != TraceConfig() else None

    def step(
        self, bucket: Bucket, publications: Sequence[SlotPublication], executor: Executor, kvcache: KVCache
    ) -> None:
        """Log one step; if KV or trees are traced, wait for all started work first."""
        self._steps += 1
        if self._config.kv or self._config.tree:
            executor.synchronize()
        if self._config.step:
            logger.info("step %d: %s, slots %s", self._steps, bucket, [p.slot for p in publications])
        if self._config.accept:
            for p in publications:
                logger.info(
                    "accept: slot %d verified %d accepted %d tokens %s finish %s",
                    p.slot,
                    p.verified,
                    p.accepted,
                    list(p.token_ids),
                    p.finish_reason,
                )
        if self._config.kv:
            logger.info("kv: %s; lengths %s", kvcache.stats(), executor.state["lengths"].tolist())
        if self._config.tree:
            for p in publications:
                count = int(executor.state["num_drafts"][p.slot]) + 1
                logger.info(
                    "tree: slot %d drafts %s masks %s",
                    p.slot,
                    executor.state["drafts"][p.slot, 1:count].tolist(),
                    [f"{mask:b}" for mask in executor.state["tree_masks"][p.slot, :count].tolist()],
                )
