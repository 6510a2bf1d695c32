"""`Loaded` is the result of a load: everything that a runtime drives."""

from dataclasses import dataclass
from typing import Any

from lowlat.engine.loading.speculation import Speculation
from lowlat.engine.memory.held import HeldMemory
from lowlat.executors import Executor
from lowlat.executors.devices import DeviceChoice
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import OpenedTarget
from lowlat.step.draft_length_costs import Costs
from lowlat.step.ladder import StepLadder
from lowlat.step.state import StepGeometry
from lowlat.text import TextCodec

__all__ = ["Loaded", "gpu_of"]


@dataclass(frozen=True)
class Loaded:
    """Everything that a Runtime drives.

    codec        the tokenizer; None if the directory has none
    rank_config  the geometry of rank 0's part; with one rank the target's own
    memory       of each device
    costs        by which the device chooses draft lengths; None: it does not choose them
    """

    target: OpenedTarget
    codec: TextCodec | None
    speculation: Speculation
    geometry: StepGeometry
    ladder: StepLadder
    executor: Executor
    choice: DeviceChoice
    rank_config: ModelConfig
    memory: tuple[HeldMemory, ...]
    costs: Costs | None = None

    @property
    def gpu(self) -> Gpu:
        """The GPU properties by which launches are sized; an H200's if no kernels run."""
        return gpu_of(self.executor)

    @property
    def takes_grammars(self) -> bool:
        """Whether steps draw under grammar masks; those of lossless SpecPV, whose tokens are verified later, do not."""
        partial = self.geometry.partial
        return "grammar_masks" in self.executor.state and not (partial is not None and partial.lossless)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens: those of its configs, then its tokenizer's."""
        ends = self.target.config.eos_token_ids
        own = None if self.codec is None else self.codec.eos_token_id
        if own is None or own in ends or own >= self.target.config.vocab_size:
            return ends
        return (*ends, own)

    @property
    def speculation_limits(self) -> dict[str, Any]:
        """The sizes of speculation, by option; {} without speculation."""
        used = self.speculation.used
        if used is None:
            return {}
        draft = None if self.geometry.speculator is None else self.geometry.speculator.draft_config
        boundaries = None if draft is None else draft.capture_boundaries
        limits = self.speculation.topologies[max(self.ladder.rows_of)].limits
        return {"method": used.method, **limits, "capture_layers": boundaries}

    def close(self) -> None:
        """End the tokenizer's process, and release the executor's buffers and weights."""
        if self.codec is not None:
            self.codec.close()
        self.executor.close()


def gpu_of(executor: Executor) -> Gpu:
    """The GPU properties by which an executor's launches are sized; an H200's if no kernels run."""
    launcher = getattr(executor, "launcher", None)
    return H200 if launcher is None else launcher.gpu
