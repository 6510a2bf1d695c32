"""This module counts, on the host, the tiles that the target's attention walks in the decode steps of a run.

A tile is 64 positions of a slot's keys and values for a block's query rows, see `lowlat.kernels.attention.tile_counts`.
The slots' lengths and verified rows decide which tiles a step walks; the step publishes both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.engine.requests.request import Request
from lowlat.kernels.attention.launch_plan import AttentionWork, choose_attention_plan
from lowlat.kernels.attention.limits import choose_split
from lowlat.kernels.attention.tile_counts import count_tiles
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.ladder import StepLadder
from lowlat.step.state import StepGeometry
from lowlat.step.variants import is_choice

__all__ = ["TileCounter", "VerifiedRows"]


class VerifiedRows(NamedTuple):
    """The rows that a step verified of one slot.

    dense          positions that all rows attend to: the committed tokens but the last
    drafts         live drafted nodes
    num_remaining  tokens that the request might still get
    forced         whether the drafts are a chain that a grammar forced
    """

    dense: int
    drafts: int
    num_remaining: int
    forced: bool

    @classmethod
    def of(cls, request: Request, publication: SlotPublication) -> "VerifiedRows":
        """Read the rows of a publication, before its request takes it."""
        forced = publication.verified_source == FORCED_DRAFTS
        return cls(len(request.committed) - 1, publication.verified, request.num_remaining, forced)


class _Heads(NamedTuple):
    """The sizes on which a layer's tiles depend."""

    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kind(self) -> str:
        """The kind of layer by which tiles are counted."""
        return "full" if self.window is None else f"window_{self.window}"


class TileCounter:
    """Adds up the tiles of decode steps, by kind of attention layer: `full`, or `window_W`."""

    def __init__(
        self, geometry: StepGeometry, topologies: Mapping[int, Topology], ladder: StepLadder, gpu: Gpu
    ) -> None:
        self._geometry, self._ladder, self._gpu = geometry, ladder, gpu
        trees = {depth: each for depth, each in topologies.items() if isinstance(each, TreeTopology)}
        self._masks = {depth: tuple(topology.packed_masks) for depth, topology in trees.items()}
        specs = geometry.config.attentions.values()
        self._layers = Counter(_Heads(s.window, s.num_heads, s.num_kv_heads, s.head_dim) for s in specs)
        self._steps = 0
        self._counts: dict[str, Counter[str]] = {heads.kind: Counter() for heads in self._layers}

    def record(self, depth: int, published: Sequence[tuple[Request, SlotPublication]]) -> None:
        """Count a decode step at a draft length, before its requests take their publications.

        First tokens come from prefill, and slots with a failed check were dropped: neither is counted.
        """
        taken = [(request, each) for request, each in published if request.has_begun and each.failed is None]
        slots = [VerifiedRows.of(request, each) for request, each in taken]
        if not slots:
            return
        bucket = self._ladder.choose(len(slots), depth)
        rows = 1 + max(slot.drafts for slot in slots) if is_choice(bucket) else bucket.rows
        masks = [self._masks_of(depth, slot, rows) for slot in slots]
        self._steps += 1
        for heads, num_layers in self._layers.items():
            for name, number in self._walked(heads, bucket.batch, rows, slots, masks).items():
                self._counts[heads.kind][name] += number * num_layers

    def report(self) -> dict[str, Any]:
        """Return a block `attention_tiles` of counts over all layers of a kind and all key-value heads, as JSON."""
        layers: Counter[str] = Counter()
        for heads, num_layers in self._layers.items():
            layers[heads.kind] += num_layers
        counts = self._counts.items()
        return {
            "attention_tiles": {kind: {"layers": layers[kind], "steps": self._steps, **found} for kind, found in counts}
        }

    def _masks_of(self, depth: int, slot: VerifiedRows, rows: int) -> list[int]:
        """The masks of a slot's rows, 0 for dead ones; live are the nodes that may still be committed, in order."""
        known = self._masks.get(depth, ()) if not slot.forced else ()
        chain = [(2 << row) - 1 for row in range(rows)]
        every = list(known[:rows]) if len(known) >= rows else chain
        deepest = max(slot.num_remaining - 1, 0)
        live = [row for row, mask in enumerate(every) if mask.bit_count() - 1 <= deepest][: slot.drafts + 1]
        return [mask if row in live else 0 for row, mask in enumerate(every)]

    def _walked(
        self, heads: _Heads, batch: int, rows: int, slots: Sequence[VerifiedRows], masks: Sequence[Sequence[int]]
    ) -> dict[str, int]:
        """Count one layer's tiles: all, those multiplied whole, those under a mask, those that no row attends to."""
        work = _work_of(self._geometry, heads, batch, rows)
        plan, _ = choose_attention_plan(work, self._gpu)
        counts = count_tiles(
            work,
            plan,
            [slot.dense for slot in slots],
            masks,
            num_blocks=plan.blocks * self._gpu.num_multiprocessors,
            live=[mask != 0 for own in masks for mask in own],
        )
        full = counts.executed - counts.masked
        return {"tiles": counts.total, "full": full, "masked": counts.masked, "empty": counts.empty}


def _work_of(geometry: StepGeometry, heads: _Heads, batch: int, rows: int) -> AttentionWork:
    split = choose_split(geometry.max_batch, geometry.max_context, heads.num_kv_heads, heads.head_dim)
    group, coded = heads.num_heads // heads.num_kv_heads, geometry.config.coded_kv is not None
    return AttentionWork(batch, rows, group, heads.num_kv_heads, heads.head_dim, heads.window, 0, split, coded)
