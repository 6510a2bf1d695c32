"""A device that hangs: the host hears of it in time, the runtime can be closed, and the kernel ends by itself.

Each case has a process of its own: a launch that fails takes its context with it.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lowlat

TARGET = Path(lowlat.__file__).parent / "demo" / "target"
WAITING = """
import sys, time
import torch
from lowlat.errors import DeviceError
from lowlat.kernels.common import sentinels
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import int64, types, uint32

def waiting(word):
    turns = uint32(0)
    while sentinels.is_missing(ptx.bits_of_float(ptx.load_relaxed_gpu_f32(word))):
        turns = sentinels.next_turn(turns)

def call(device):
    word = torch.full((1,), -1, dtype=torch.int32, device=device)
    return KernelCall(Kernel("waiting", waiting, (types.int64,), 32), (1, 1, 1), (word,), dependent=False)
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WAITING + textwrap.dedent(script), *arguments],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_launch_that_waits_in_vain_fails_by_itself() -> None:
    """In seconds, and not at once: what it waits for may take a while."""
    said = run("""
        from lowlat.executors.launcher import Launcher
        device = torch.device("cuda", 0)
        launcher = Launcher(device)
        hanging = call(device)
        launcher.prepare(hanging)
        start = time.monotonic()
        launcher.run(hanging)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print("failed after", time.monotonic() - start, error)
    """)
    assert said.startswith("failed after ")
    assert 0.5 < float(said.split()[2]) < 60.0


@pytest.mark.parametrize("executor", ["eager", "graph", "loop"])
def test_a_step_that_hangs_is_a_device_error_in_time(executor: str) -> None:
    """While the kernel still spins; closing does not wait for it."""
    script = """
        from lowlat import Runtime, SamplingParams
        name = sys.argv[2]
        options = {"executor": "eager"} if name == "eager" else {"executor": "graph", "device_loop": name == "loop"}
        limits = {"watchdog_factor": 2.0, "watchdog_min_s": 0.2}
        runtime = Runtime.load(sys.argv[1], device="cuda:0", max_batch=1, max_context=512, **options, **limits)
        runtime.submit([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        for _ in range(40):
            runtime.step()
        executor = runtime.executor
        hanging = call(executor.device)
        executor.launcher.prepare(hanging)
        with torch.cuda.stream(executor.stream):
            executor.launcher.run(hanging)
        start = time.monotonic()
        try:
            while runtime.busy:
                runtime.step()
        except DeviceError as error:
            print("raised after", time.monotonic() - start, error, flush=True)
        runtime.close()
        print("closed after", time.monotonic() - start)
    """
    raised, closed = run(script, str(TARGET), executor).splitlines()
    assert raised.startswith("raised after ") and "hangs: step" in raised and "watchdog_min_s" in raised
    assert closed.startswith("closed after ")
    assert float(closed.split()[2]) < 3.0  # the kernel spins for longer
