"""Ranks of which a GPU is lost or full: an error that names the GPU, in time.

A fault has a process of its own: it takes the GPU's context with it.
"""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

import lowlat
from lowlat.cli.options import bundled
from lowlat.errors import ConfigError

pytestmark = pytest.mark.timeout(240)
SHAPES: dict[str, Any] = {
    "max_batch": 2,
    "max_context": 256,
    "device": "cuda",
    "executor": "graph",
    "tensor_parallel_size": 2,
}
FAULT = """
    import sys, time
    import torch
    import lowlat
    from lowlat.errors import DeviceError
    from lowlat.engine.loading import loading
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
    from lowlat.kernels.toolchain.numba_cuda import types, uint32

    def fault(address):
        ptx.store_global_u32(address, uint32(1))

    target, head, rank, how, *GPUs = sys.argv[1:]
    devices, rank = [torch.device("cuda", int(GPU)) for GPU in GPUs], int(rank)
    if devices[0] == devices[1]:
        loading.rank_devices = lambda choice, size, named=(): devices
    draft = lowlat.SpeculativeConfig(model=head, num_speculative_tokens=3, strict=True)
    options = {"max_batch": 2, "max_context": 512, "device": "cuda", "device_loop": how == "loop"}
    runtime = lowlat.Runtime.load(target, draft, tensor_parallel_size=2, **options)
    runtime.submit("The President shall", lowlat.SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(24):
        runtime.step()
    lost = runtime.executor.ranks[rank]
    call = KernelCall(Kernel("fault", fault, (types.int64,), 32), (1, 1, 1), (16,), dependent=False)
    with torch.cuda.device(lost.device), torch.cuda.stream(lost.stream):
        lost.launcher.prepare(call)
        start = time.monotonic()
        lost.launcher.run(call)
    try:
        while runtime.busy:
            runtime.step()
    except DeviceError as error:
        print("raised after", time.monotonic() - start, str(error).replace("\\n", " "), flush=True)
    try:
        runtime.close()
    except DeviceError as error:
        print("closing tells", str(error).replace("\\n", " "), flush=True)
    print("closed after", time.monotonic() - start, flush=True)
"""


@pytest.mark.parametrize(("rank", "how"), [(1, "steps"), (0, "steps"), (1, "loop")])
def test_a_lost_gpu_ends_the_step_of_all(rank: int, how: str, rank_gpus: list[torch.device]) -> None:
    """The other one waits for rows that never come; closing waits for neither."""
    gpus = [str(gpu.index) for gpu in rank_gpus]
    arguments = [bundled("target"), bundled("head"), str(rank), how, *gpus]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAULT), *map(str, arguments)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    raised, closed = lines[0], lines[-1]
    assert raised.startswith("raised after ") and f"cuda:{gpus[rank]} failed" in raised, done.stdout
    assert float(raised.split()[2]) < 1.0, raised
    assert closed.startswith("closed after ") and float(closed.split()[2]) < 4.0, closed


def test_a_full_gpu_is_refused_by_name(rank_gpus: list[torch.device]) -> None:
    """Its memory is held by somebody else: nothing is allocated on the other one either."""
    first, full = rank_gpus
    if first == full:
        pytest.skip("both ranks are on one GPU")
    before, held, size = torch.cuda.memory_allocated(first), [], torch.cuda.mem_get_info(full)[0]
    while size > 4 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=full))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        with pytest.raises(ConfigError, match=r"GiB are needed on cuda:1 .* lower max_batch"):
            lowlat.Runtime.load(bundled("target"), **SHAPES)
        assert torch.cuda.memory_allocated(first) == before
    finally:
        held.clear()
        torch.cuda.empty_cache()
    with lowlat.Runtime.load(bundled("target"), **SHAPES) as runtime:
        assert runtime.submit([1, 2, 3], lowlat.SamplingParams(max_tokens=1))
