"""Our step for the dense benchmark: the graph executor on a geometry without a checkpoint, put into the middle of a
long context with random keys and values. Acceptance is imposed where the step drafts.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from bench.dense_cases import Case, DenseGeometry
from lowlat.checkpoint.source import WeightSource
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.graph import GraphExecutor
from lowlat.executors.make import make_executor
from lowlat.graphs import Bucket, BufferSet, Paging
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, MAX_LENGTH, NUM_LOGPROBS, REPETITION, TOP_P
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, LayerSpec, RopeConfig
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry
from lowlat.tools.profile.recording import LEAD, record_kernels
from lowlat.tools.profile.report import Summary, summarise
from lowlat.tools.profile.sites import call_sites
from lowlat.tools.profile.times import CallSite, attribute

__all__ = ["BLOCK_SIZE", "ROOM", "ExecutorStep", "GraphStep", "fill_state", "make_step", "sound_rows", "step_geometry"]

ROOM = 1024  # tokens past the case's context that replays between resets may add
BLOCK_SIZE = 32


def make_step(
    geometry: DenseGeometry, case: Case, weights: Mapping[str, torch.Tensor], device: torch.device
) -> "GraphStep":
    """Make the step of a case; a `StepFactory`."""
    return GraphStep(geometry, case, weights, device)


def step_geometry(geometry: DenseGeometry, case: Case, topology: Topology) -> StepGeometry:
    """The shapes of one case's programs; a head is loaded only where the case drafts."""
    depth, overhang = case.num_speculative_tokens, max(topology.num_nodes, topology.num_drafted_rows)
    mixer = AttentionSpec(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        rope=RopeConfig(theta=geometry.rope_theta),
    )
    layer = LayerSpec(mixer=mixer, ffn=DenseSpec(inner_size=geometry.intermediate_size))
    shared = {
        "hidden_size": geometry.hidden_size,
        "vocab_size": geometry.vocab_size,
        "max_position": case.context + ROOM,
        "rms_norm_eps": geometry.rms_norm_eps,
    }
    config = ModelConfig(
        family="llama",
        layers=(layer,) * geometry.num_layers,
        tie_embeddings=False,
        dtype="bfloat16",
        **shared,  # type: ignore[arg-type]
    )
    draft = Eagle3Config(
        layout="specforge",
        layers=(layer,),
        target_hidden_size=geometry.hidden_size,
        draft_vocab_size=geometry.draft_vocab_size,
        capture_boundaries=geometry.capture_boundaries,
        **shared,  # type: ignore[arg-type]
    )
    return StepGeometry(
        config=config,
        speculator=Eagle3Speculator(draft) if depth else None,
        max_batch=case.batch,
        max_context=case.context + ROOM,
        max_rows=topology.num_nodes,
        num_paths=topology.num_paths,
        path_width=topology.path_width,
        block_size=BLOCK_SIZE,
        num_blocks=case.batch * -(-(case.context + ROOM + overhang) // BLOCK_SIZE) + 1,
        prefill_chunk=128,
        simulated_acceptance=case.acceptance,
        num_drafted_rows=topology.num_drafted_rows,
    )


def fill_state(state: BufferSet, shapes: StepGeometry, case: Case, seed: int = 0) -> None:
    """Put every slot into the middle of a request at the case's context, with random tokens, blocks, keys and values.

    Tokens and blocks follow from the seed, whatever the device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, spec in state.specs.items():
        if spec.paging is Paging.POSITIONS:
            if state[name].is_floating_point():
                state[name].normal_()
            else:
                state[name].random_(0, 127)  # codes that are numbers
    width = state["block_table"].shape[1]
    blocks = 1 + torch.randperm(shapes.num_blocks - 1, generator=generator)[: case.batch * width]
    for name in state:
        if name.startswith("block_table"):  # of layers of windows, too: their pools are as large
            state[name].copy_(blocks.view(case.batch, width))
    tokens = state["tokens"]
    tokens.copy_(torch.randint(shapes.config.vocab_size, tuple(tokens.shape), generator=generator))
    state["slot_ints"].zero_()
    state["slot_ints"][:, MAX_LENGTH] = shapes.max_context
    state["slot_ints"][:, DRAFT_LIMIT] = shapes.max_rows - 1
    state["slot_ints"][:, NUM_LOGPROBS] = -1
    state["slot_floats"].zero_()
    state["slot_floats"][:, TOP_P] = 1.0
    state["slot_floats"][:, REPETITION] = 1.0
    state["stop_ids"].fill_(-1)
    state["bias_ids"].fill_(-1)
    if shapes.checks is not None:
        state["staged_table"].copy_(state["block_table"])
    start_slots(state, case)


def start_slots(state: Mapping[str, torch.Tensor], case: Case) -> None:
    """Put every slot's length to the case's context, and let it decode; drafts stay as they are."""
    for name in ("lengths", "checked_lengths"):
        if name in state:
            state[name].fill_(case.context)
    if "state_lens" in state:  # the row before the root waits, as in a step that follows one without drafts
        state["state_lens"].fill_(case.context - 2)
    state["active"].fill_(1)


def sound_rows(scratch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Whether each row is dead or has finite logits, by a step's scratch buffers."""
    return (scratch["finite"] != 0) | (scratch["row_live"] == 0)


class ExecutorStep:
    """One bucket's graph, with every slot active at the case's context; its `close` releases the graph.

    shapes   of the runtime's programs
    weights  canonical, or packed experts, as the executor takes them
    drafted  what the step drafts
    """

    def __init__(
        self,
        shapes: StepGeometry,
        case: Case,
        weights: Mapping[str, torch.Tensor | PackedExperts],
        device: torch.device,
        drafted: Topology,
    ) -> None:
        self.name = "lowlat"
        self.case = case
        self.bucket = Bucket(case.batch, drafted.num_nodes, drafted.depth)
        program = build_step(shapes, self.bucket, drafted)
        used = weights
        if not isinstance(weights, WeightSource) and not drafted.depth:
            used = {name: weights[name] for name in weights if not name.startswith("head.")}
        kind = "graph" if device.type == "cuda" else "reference"
        choice = DeviceChoice(device, kind, "a benchmark")
        made = make_executor(choice, {self.bucket: program}, build_prefills(shapes), used)  # type: ignore[arg-type]
        self.executor = cast(GraphExecutor, made)
        self.num_launches = self.executor.num_kernels(self.bucket) if kind == "graph" else 0
        self._fill(shapes)

    def _fill(self, shapes: StepGeometry) -> None:
        fill_state(self.executor.state, shapes, self.case)
        if self.executor.device.type == "cuda":
            torch.cuda.synchronize(self.executor.device)
        for _ in range(2):  # the first step has no drafts yet
            self.executor.step(self.bucket)
        self.executor.synchronize()

    def distinct_experts(self) -> list[int]:
        """The experts that the rows of each layer chose, counted over one step that is launched kernel by kernel."""
        executor, counts = self.executor, []
        ids = executor.scratch(self.bucket)["expert_ids"]
        torch.cuda.synchronize(executor.device)  # replays may be under way on another stream
        with torch.cuda.stream(executor.stream):
            stream = executor.launcher.stream()
            for group, launches in executor.prepare(self.bucket):
                for launch in launches:
                    launch.issue(stream)
                if any(op.kind == "router" for op in group.ops):
                    executor.stream.synchronize()
                    counts.append(len(set(ids.flatten().tolist()) - {-1}))
            executor.stream.synchronize()
        return counts

    def replay(self) -> None:
        """Launch one step on torch's current stream; the reference runs it."""
        if self.executor.device.type != "cuda":
            self.executor.step(self.bucket)
            return
        stream = self.executor.launcher.stream()
        self.executor.graph(self.bucket).launch(stream)

    def reset(self) -> None:
        """See `bench.soak.Soaked`."""
        start_slots(self.executor.state, self.case)

    def looks(self) -> list[tuple[Mapping[str, torch.Tensor], torch.Tensor]]:
        """See `bench.soak.Soaked`."""
        if self.executor.device.type == "cuda":
            torch.cuda.synchronize(self.executor.device)  # replays may be under way on another stream
        return [(self.executor.state, sound_rows(self.executor.scratch(self.bucket)))]

    def sites(self, num_experts: float = 0.0) -> Sequence[CallSite]:
        """The launches of a step at the case's context, with the bytes that each must read.

        num_experts  distinct experts that a layer's rows choose
        """
        lengths = [self.case.context] * self.case.batch
        return call_sites(self.executor.groups(self.bucket), self.executor.state, [lengths], num_experts)

    def profile(self, num_steps: int, wall_gb_per_s: float, sites: Sequence[CallSite] | None = None) -> Summary:
        """Record steps and sum them up by kernel; sites: None takes `sites()`."""
        self.reset()

        def run() -> None:
            for _ in range(LEAD + num_steps):
                self.replay()

        (events,) = record_kernels(run, [self.executor.device])
        return summarise(attribute(events, self.sites() if sites is None else sites, skip=LEAD), wall_gb_per_s)

    def close(self) -> None:
        """Release the graph and its memory."""
        self.executor.close()


class GraphStep(ExecutorStep):
    """The step of a dense geometry; it drafts `topology`, or a chain; shapes: None takes `step_geometry`'s."""

    def __init__(
        self,
        geometry: DenseGeometry,
        case: Case,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        topology: Topology | None = None,
        shapes: StepGeometry | None = None,
    ) -> None:
        drafted = TreeTopology.chain(case.num_speculative_tokens) if topology is None else topology
        shapes = step_geometry(geometry, case, drafted) if shapes is None else shapes
        super().__init__(shapes, case, weights, device, drafted)
