"""This module runs child processes, for work that could not be stopped in a thread, and ends them."""

import subprocess

__all__ = ["end_child"]

GRACE_S = 0.2


def end_child(process: "subprocess.Popen[bytes]") -> None:
    """End a process whose input was closed, and wait for it, so that nothing of it stays after.

    One that ended by itself (the kernel took its processor time away) keeps its own exit status: the end of its
    output comes before the kernel reaps it, hence the short wait.
    """
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
