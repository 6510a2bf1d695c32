"""Prefill's row-wise operations by the step's kernels, which read and write once where torch takes several passes.

They take any number of rows, so a chunk is one launch an operation. Products, attention and experts are not row-wise.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from lowlat.executors.device_weights import DeviceWeights
from lowlat.executors.launcher import Launcher
from lowlat.graphs.launch import Launch
from lowlat.kernels.attention.kv_write import prefill_kv_write
from lowlat.kernels.rows.draft_input import concat_norms
from lowlat.kernels.rows.elementwise import add, cast, silu_mul
from lowlat.kernels.rows.embed import embed
from lowlat.kernels.rows.norm import rms_norm, split_norms
from lowlat.kernels.rows.rotate import rotate
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.program.program import Op

__all__ = ["ROW_KERNELS", "Launches", "row_calls"]

ROW_KERNELS: Mapping[str, Callable[..., Sequence[KernelCall]]] = MappingProxyType(
    {
        "add": add,
        "cast": cast,
        "concat_norms": concat_norms,
        "embed": embed,
        "prefill_kv_write": prefill_kv_write,
        "rms_norm": rms_norm,
        "rope": rotate,
        "silu_mul": silu_mul,
        "split_norms": split_norms,
    }
)


def row_calls(op: Op, arguments: Mapping[str, object], weights: DeviceWeights) -> Sequence[KernelCall]:
    """The calls of an operation over its buffers; none for one that no kernel covers. Raises ShapeError."""
    build = ROW_KERNELS.get(op.kind)
    if build is None:
        return ()
    find = weights.table if op.kind == "embed" else weights.vector
    return build(**arguments, **{name: find(weight) for name, weight in op.weights.items()})


class Launches:
    """What a prefill program launches, gathered while it is bound, so that all of it is compiled together."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._waiting: list[tuple[Sequence[KernelCall], list[Launch]]] = []
        self.card = launcher.card

    def add(self, calls: Sequence[KernelCall]) -> Callable[..., None]:
        """Calls as one operation, on torch's current stream. It may run once all are loaded."""
        launcher, launches = self._launcher, list[Launch]()
        self._waiting.append((calls, launches))

        def run(**_: object) -> None:
            stream = launcher.stream()
            for launch in launches:
                launch.issue(stream)

        return run

    def load(self) -> None:
        """Compile, on all cores, and load what was added."""
        self._launcher.compile_ahead(call for calls, _ in self._waiting for call in calls)
        for calls, launches in self._waiting:
            launches.extend(self._launcher.prepare(call) for call in calls)
        self._waiting.clear()
