"""This module runs child processes, for work that could not be stopped in a thread, and ends them."""

import subprocess

__all__ = ["end_child"]

GRACE_S = 0.2


def end_child(process: "subprocess.Popen[bytes]") -> None:
    """End a process whose input was closed, and wait until it is gone.

    A process that has ended by itself, as at its limit of processor time, keeps its own exit status. Its output closes
    before the kernel lets it be reaped, hence the short wait.
    """
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
