"""This module moves contents of the prefix cache between blocks and tiers, and zeroes failed requests' blocks."""

import logging

from lowlat.engine.launches.launches import Launches
from lowlat.errors import CapacityError
from lowlat.executors import Executor
from lowlat.sequence.kvcache import KVCache
from lowlat.step.state import StepGeometry

__all__ = ["CacheMoves"]

logger = logging.getLogger("lowlat.engine.steps")


class CacheMoves:
    """Makes the moves that one runtime's KV cache asks for; all are queued before the next prefill or step.

    failed_slots  slots of failed requests, whose state is to be zeroed
    """

    def __init__(self, executor: Executor, geometry: StepGeometry, kvcache: KVCache, launches: Launches) -> None:
        self._executor, self._kvcache, self._launches = executor, kvcache, launches
        self._slot_pools = [pool for state in geometry.sequence_states for pool in state.slot_pools()]
        self.failed_slots: list[int] = []

    def fill(self) -> None:
        """Write to blocks the contents that prompts found in the cache's tiers, and those of sessions' files."""
        loads = self._kvcache.take_loads()
        if not loads:
            return
        self.clear()  # zero failed requests' blocks before some of them are written
        mover = self._executor.mover
        apart = [load for load in loads if load.holder is not None]
        if apart and self._kvcache.tiers is not None:
            self._kvcache.tiers.copy_in(apart, mover.mark())
        for load in loads:
            if load.holder is None:
                mover.write(load.pool, load.places, load.content)

    def keep(self) -> None:
        """Copy the blocks that prefill has written to the cache's tiers."""
        tiers = self._kvcache.tiers
        if tiers is None or not (saves := self._kvcache.take_saves()):
            return
        mover = self._executor.mover
        if apart := [save for save in saves if save.holder is not None]:
            tiers.copy_out(apart, mover.mark())
        for save in saves:
            if save.holder is None:
                try:
                    content = mover.read(save.key.pool, save.places)
                except CapacityError as error:
                    logger.warning("a part of the prefix cache is not kept: %s", error)
                    continue
                tiers.put(save.key, content, spare=save.spare)

    def keep_all(self) -> None:
        """Copy all shareable contents to the cache's tiers, as far as they have space, and wait for the copies."""
        tiers = self._kvcache.tiers
        if tiers is None:
            return
        self.fill()  # contents for a request that was cancelled meanwhile
        tiers.flush()
        self._kvcache.note_all()
        self.keep()
        tiers.flush()

    def clear(self) -> None:
        """Zero the blocks of failed requests, and the state of their slots."""
        self._launches.clear_blocks(self._kvcache.take_blocks_to_clear())
        for pool, blocks in self._kvcache.take_pool_blocks_to_clear().items():
            self._launches.clear_blocks(blocks, pool)
        for pool in self._slot_pools:
            self._launches.clear_blocks(self.failed_slots, pool)
        self.failed_slots.clear()
