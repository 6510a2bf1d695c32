"""This module names the signals that ask a process to end."""

import signal

__all__ = ["ending_signals"]


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, Ctrl-C, and that the terminal was closed, unless that is ignored, as `nohup` has it."""
    asked = (signal.SIGTERM, signal.SIGINT)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)
