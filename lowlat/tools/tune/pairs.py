"""This module makes the pairs whose launches are tuned: programs over tensors without memory.

Layers of a model are alike, so a pair has few of them: every kind of attention window, and as many as the draft model
reads. Where a pair is cut for several GPUs, the programs are one rank's, on one GPU: see `loopback`. No weight is
read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from lowlat.checkpoint.quantising import Quantiser
from lowlat.engine.loading.geometry import make_geometry, rank_geometries
from lowlat.engine.loading.programs import bucket_batches
from lowlat.errors import ConfigError
from lowlat.executors.distributed.parallel import exchanged_rows
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.planned import META, buffers_without_memory, weights_without_memory
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.kernels.attention.limits import INVARIANT_HEADS, finely_split, shortly_split
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, sum_in_parts
from lowlat.lowering.covers import uncovered
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.lower import LoweredGroup, lower
from lowlat.models.activations import code_activations
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import AttentionSpec, LayerSpec
from lowlat.models.prefill_chunks import most_prefill_chunks
from lowlat.models.rank_weights import rank_weights
from lowlat.models.target import coded, read_model_config, rounding
from lowlat.options.method_options import TEXT_METHODS
from lowlat.options.runtime import FEW_SLOTS, RuntimeConfig
from lowlat.options.slots import most_drafts
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from lowlat.speculators import base
from lowlat.speculators.base import Speculator
from lowlat.speculators.dflash.speculator import DflashSpeculator
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.methods import draft_method, plan_speculator, rounded_speculator
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.ladder import StepLadder
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry
from lowlat.step.variants import first_token_bucket
from lowlat.tools.tune.loopback import LoopedMemory

__all__ = [
    "LoweredPrograms",
    "Pair",
    "PairPrograms",
    "Sizes",
    "cut_pair",
    "every_part",
    "open_pair",
    "random_pair",
    "rounded_pair",
    "sizes_of",
    "weight_shapes",
]

LONG_CONTEXT = 65536  # of a slot
LEAST_LAYERS = 2  # so that a layer stands next to another


@dataclass(frozen=True)
class Pair:
    """A target and its speculator, by their configs, whole, and for how many GPUs they are cut.

    speculator            None: none
    tensor_parallel_size, tp_invariant, draft_tensor_parallel_size  see `RuntimeConfig` and `SpeculativeConfig`
    """

    name: str
    config: ModelConfig
    speculator: Speculator | None
    tensor_parallel_size: int = 1
    tp_invariant: bool = False
    draft_tensor_parallel_size: int | None = None

    @property
    def attending(self) -> tuple[object, ...]:
        """Equal for pairs whose launches of attention are the same: of models that have other vocabularies alone."""
        draft = None if self.speculator is None else self.speculator.draft_config
        cut = self.tensor_parallel_size, self.tp_invariant, self.draft_tensor_parallel_size
        layers = None if draft is None else draft.layers
        return self.name, self.config, type(self.speculator), layers, cut

    @property
    def split_heads(self) -> tuple[int, ...]:
        """The numbers of key-value heads by which a GPU's splits of positions are chosen, each once."""
        if self.tp_invariant:
            return (INVARIANT_HEADS,)
        counts = (spec.num_kv_heads for spec in self.config.attentions.values())
        return tuple(dict.fromkeys(max(count // self.tensor_parallel_size, 1) for count in counts))


@dataclass(frozen=True)
class Sizes:
    """The buckets of a runtime, or of several of few slots, that are tuned for.

    batches             slots, the most a runtime's `max_batch`: of more than FEW_SLOTS it has GEMMs of its own in all
                        of its buckets
    depths              draft tokens, of which steps of so many slots have as many as they have rows for; 0: no drafts
    max_context         positions
    prefill_chunk, max_prefill_chunks  see `RuntimeConfig`
    forced_rows         rows of the widest steps that verify what the host proposes; those of text's drafts
                        (`wide_rows`) have the same launches. 0: there are none
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    depths: tuple[int, ...] = tuple(range(MAX_SPECULATIVE_TOKENS + 1))
    max_context: int = 4096
    prefill_chunk: int = RuntimeConfig.prefill_chunk
    max_prefill_chunks: int | None = None
    forced_rows: int = 0

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """The depths that the runtime's steps verify."""
        return tuple(depth for depth in self.depths if depth <= most_drafts(max(self.batches)))

    def with_prompts(self, config: ModelConfig) -> "Sizes":
        """The sizes with a context of as many positions at least as a target's prompts have at once."""
        chunk = self.prefill_chunk
        at_once = chunk * most_prefill_chunks(config, chunk, self.max_prefill_chunks)
        return replace(self, max_context=max(self.max_context, at_once))

    def of_attention(self, num_gpus: int, kv_heads: int) -> tuple["Sizes", ...]:
        """The sizes of which all splits of positions come, with the longest contexts that each has.

        num_gpus  that have parts of the heads: contexts of so many times as many positions are split alike
        kv_heads   by which a GPU's splits are chosen
        """
        each = [(batch, most(batch, kv_heads)) for most in (shortly_split, finely_split) for batch in self.batches]
        shorter = (replace(self, batches=(batch,), max_context=most) for batch, most in each if most)
        return replace(self, max_context=LONG_CONTEXT * num_gpus), *shorter


def sizes_of(max_batches: Iterable[int], sizes: Sizes) -> list[Sizes]:
    """The sizes of runtimes of so many slots with all of their buckets, in all else as `sizes` has them."""
    runtimes = sorted(set(max_batches))
    few = {batch for most in runtimes if most <= FEW_SLOTS for batch in bucket_batches(most)}
    many = [tuple(bucket_batches(most)) for most in runtimes if most > FEW_SLOTS]
    return [replace(sizes, batches=batches) for batches in (tuple(sorted(few)), *many) if batches]


def open_pair(target: Path, draft_model: Path | None, dtype: str = "auto", method: str | None = None) -> Pair:
    """The pair of two directories, or a target that drafts by a method of its own, no weight read.

    method  of drafts without a draft model's directory; None: no drafts. Raises ConfigError.
    """
    config = read_model_config(target, dtype=dtype)
    speculator = None
    if draft_model is not None:
        speculator = plan_speculator(
            SpeculativeConfig(model=draft_model, method=draft_method(draft_model), num_speculative_tokens=1), config
        )
    elif method is not None:
        speculator = plan_speculator(SpeculativeConfig(method=method, num_speculative_tokens=1), config, target)
    return Pair(target.resolve().name, config, speculator)


def random_pair(name: str, directory: Path, method: str = "eagle3", *, whole: bool = False) -> Pair:
    """A named geometry, with its draft model of a method; its target's config.json is written into a directory.

    method  of TEXT_METHODS, too, which have none
    whole   the draft model drafts all of the target's ids
    A geometry that has no draft models at all is alone, but for drafts from text.

    Raises ConfigError for another name, or where the geometry has no such draft model.
    """
    from lowlat.tools.bench.geometry import random_target, read_geometries
    from lowlat.tools.draft_model.random_models import random_speculator

    known = read_geometries()
    if name not in known:
        raise ConfigError(f"geometry {name!r} is not known; there are {', '.join(sorted(known))}")
    geometry = known[name].with_whole_vocabulary() if whole else known[name]
    config = random_target(geometry, directory).config
    if method in TEXT_METHODS:
        return Pair(name, config, plan_speculator(SpeculativeConfig(method=method, num_speculative_tokens=1), config))
    speculator = random_speculator(geometry, config, method) if geometry.has_draft_models else None
    return Pair(name, config, speculator)


def rounded_pair(pair: Pair, options: RuntimeConfig, draft: Literal["fp8", "int4"] | None = None) -> Pair:
    """The pair with linear layers rounded at load, as `quantize`, `quantize_lm_head` and `draft_quantize` ask for, and
    with a cache of codes where `kv_cache_dtype` does, and prompts' rows of codes where `activations` does.

    Raises ConfigError for weights that are quantised already, and as `code_activations` does.
    """
    config, speculator = pair.config, pair.speculator
    if options.quantize is not None:
        config = rounding(config, Quantiser(options.quantize, options.quantize_lm_head), pair.name)
    if options.kv_cache_dtype == "fp8":
        config = coded(config)
    if options.activations is not None:
        config = code_activations(config, pair.name)
    return replace(
        pair, config=config, speculator=None if speculator is None else rounded_speculator(speculator, draft)
    )


def cut_pair(pair: Pair, options: RuntimeConfig, draft_tensor_parallel_size: int | None = None) -> Pair:
    """The pair cut for as many GPUs as `tensor_parallel_size` says, and `tp_invariant`; the draft model as
    `draft_tensor_parallel_size` does."""
    return replace(
        pair,
        tensor_parallel_size=options.tensor_parallel_size,
        tp_invariant=options.tp_invariant,
        draft_tensor_parallel_size=draft_tensor_parallel_size,
    )


def _few_layers(pair: Pair) -> Pair:
    """The pair with few layers of each kind."""
    config, speculator = pair.config, pair.speculator
    boundaries: tuple[int, ...] = ()
    if isinstance(speculator, (DflashSpeculator, Eagle3Speculator)):
        boundaries = tuple(range(1, len(speculator.config.capture_boundaries) + 1))
        speculator = speculator.with_config(replace(speculator.config, capture_boundaries=boundaries))
    kinds = tuple(dict.fromkeys(config.layers))
    count = min(config.num_layers, max(LEAST_LAYERS, len(kinds), *boundaries, 0))
    few = (*kinds, *config.layers)[:count]
    layers = tuple(_reading_from(layer, few.index, config) for layer in few)
    return replace(pair, config=replace(config, layers=layers), speculator=speculator)


def _reading_from(layer: LayerSpec, place_of: Callable[[LayerSpec], int], config: ModelConfig) -> LayerSpec:
    """A layer among few: one that reads another's keys and values reads those of the first layer of that kind."""
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec) or mixer.kv_layer is None:
        return layer
    return replace(layer, mixer=replace(mixer, kv_layer=place_of(config.layers[mixer.kv_layer])))


def weight_shapes(pair: Pair) -> dict[str, torch.Tensor]:
    """The canonical weights of a pair, whole, without memory."""
    return base.weight_shapes(pair.config, pair.speculator)


class LoweredPrograms:
    """Programs of a pair, or of one rank's part of it, lowered for a GPU onto tensors that have no memory.

    rank       the geometry of the rank's part; None: the programs are the whole pair's
    place      what the rank exchanges by
    workspace  of all of them
    Raises ConfigError for a pair that the kernels do not cover.
    """

    def __init__(
        self,
        pair: Pair,
        gpu: Gpu,
        programs: Iterable[Program],
        rank: ModelConfig | None = None,
        place: RankPlace | None = None,
    ) -> None:
        self.pair, self._gpu, self.programs = pair, gpu, tuple(programs)
        problem = uncovered(self.programs, weight_shapes(pair))
        if problem is not None:
            raise ConfigError(f"{pair.name} has no launches: {problem}")
        self._rank, self._place = rank, place
        self._is_invariant = sum_in_parts(self.programs)
        self.workspace = SharedWorkspace(META)
        self._buffers: dict[int, Mapping[str, torch.Tensor]] = {}

    @cached_property
    def weight_shapes(self) -> dict[str, torch.Tensor]:
        """Canonical weights, without memory."""
        found = weight_shapes(self.pair)
        return found if self._rank is None else rank_weights(found, self._rank)

    @cached_property
    def weights(self) -> DeviceWeights:
        """The weights as kernels read them, without memory."""
        return weights_without_memory(self.weight_shapes, self.programs, self._gpu)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of these few layers."""
        unique = {id(tensor): tensor for tensor in self.weight_shapes.values()}.values()
        return sum(tensor.nbytes for tensor in unique)

    def groups(
        self, program: Program, gpu: Gpu, loop: LoopControl | None = None, *, switches: bool = False
    ) -> tuple[LoweredGroup, ...]:
        """One of the programs lowered for the pair's GPU, with another table perhaps, onto the same tensors.

        loop, switches  see `Binding`
        """
        buffers = self._buffers.get(id(program))
        if buffers is None:
            buffers = self._buffers[id(program)] = buffers_without_memory(program)
        place = self._place
        binding = Binding(
            program, buffers, self.weights, gpu, self.workspace, loop, switches, place,
            is_invariant=self._is_invariant,
        )  # fmt: skip
        groups = lower(binding)
        return groups if place is None else place.forwarding(groups, torch.empty(1, dtype=torch.int64, device=META))


class PairPrograms(LoweredPrograms):
    """The programs of a pair for a GPU: steps of the buckets, first tokens, prefills of all sizes; of few layers.

    rank         whose part they are, if the pair is cut
    prompts      whether prefills are among them
    layer_share  layers of the whole target for each of these
    abort        [1] int64, not zero where a launch gave up a wait for a peer, see `PeerRows`; None: there are no peers
    Raises ConfigError for a pair that the kernels do not cover, or that cannot be cut so.
    """

    def __init__(self, pair: Pair, gpu: Gpu, sizes: Sizes, rank: int = 0, *, prompts: bool = True) -> None:
        few = _few_layers(pair)
        self.layer_share = pair.config.num_layers / few.config.num_layers
        geometry = _geometries(few, sizes)[rank]
        programs, own, place = list(_programs(geometry, sizes, prompts=prompts)), None, None
        self.abort: torch.Tensor | None = None
        if pair.tensor_parallel_size > 1:
            devices = [torch.device(META.type, number) for number in range(pair.tensor_parallel_size)]
            peers = LoopedMemory(devices, exchanged_rows(programs))
            place, self.abort = RankPlace(rank, peers), peers.abort
        if geometry.config.shard is not None:
            own = geometry.config
        super().__init__(few, gpu, programs, own, place)


def every_part(pair: Pair, gpu: Gpu, sizes: Sizes, *, prompts: bool = True) -> list[PairPrograms]:
    """The programs of a pair, or of every rank of it whose part has other extents than those before. Raises ConfigError
    as `PairPrograms` does."""
    ranks: dict[tuple[object, ...], int] = {}
    for rank, geometry in enumerate(_geometries(pair, sizes)):
        ranks.setdefault(_extents(geometry), rank)
    return [PairPrograms(pair, gpu, sizes, rank, prompts=prompts) for rank in ranks.values()]


def _extents(geometry: StepGeometry) -> tuple[object, ...]:
    """The extents of a rank's part of the target and of its draft model, of which parts of one pair may differ."""
    config, speculator = geometry.config, geometry.speculator
    draft = None if speculator is None else speculator.draft_config
    parts = [(config, config.vocab_size)] + ([] if draft is None else [(draft, draft.draft_vocab_size)])
    found: list[object] = []
    for part, vocab_size in parts:
        first, last = (0, vocab_size) if part.shard is None else part.shard.vocabulary(vocab_size)
        found += [*dict.fromkeys(part.layers), last - first]
    return tuple(found)


def _topologies(pair: Pair, sizes: Sizes) -> dict[int, TreeTopology]:
    depths = sizes.draft_lengths if pair.speculator is not None else (0,)
    return {depth: TreeTopology.chain(depth) for depth in sorted({0, *depths})}


def _geometries(pair: Pair, sizes: Sizes) -> list[StepGeometry]:
    """The shapes of each rank's programs. Raises ConfigError for a pair that cannot be cut so."""
    config, speculative = pair.config, None
    options = RuntimeConfig(
        max_batch=max(sizes.batches), max_context=min(sizes.max_context, config.usual_context), dtype=config.dtype,
        prefill_chunk=sizes.prefill_chunk, max_prefill_chunks=sizes.max_prefill_chunks,
        tensor_parallel_size=pair.tensor_parallel_size, tp_invariant=pair.tp_invariant,
        forced_rows=sizes.forced_rows,
        prompt_logprobs=False,  # as in strict mode, which is what tables are complete for
    )  # fmt: skip
    if pair.draft_tensor_parallel_size is not None:
        speculative = SpeculativeConfig(
            model=pair.name, draft_tensor_parallel_size=pair.draft_tensor_parallel_size
        )  # its model is read already
    return rank_geometries(
        make_geometry(config, pair.speculator, _topologies(pair, sizes), options, None), options, speculative
    )


def _programs(geometry: StepGeometry, sizes: Sizes, *, prompts: bool) -> Iterator[Program]:
    depths = sizes.draft_lengths if geometry.speculator is not None else (0,)
    buckets = [
        *(Bucket(batch, depth + 1, depth) for batch in sizes.batches for depth in depths),
        *StepLadder(sizes.batches, {0: 1}, wide=(geometry.forced_rows, max(depths, default=0))).wide_buckets,
        *(first_token_bucket(depth) for depth in depths),
    ]
    yield from (build_step(geometry, bucket, TreeTopology.chain(bucket.num_speculative_tokens)) for bucket in buckets)
    if prompts:
        yield from build_prefills(geometry).values()
