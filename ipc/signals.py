"""This module names the signals that ask a process to end."""

import signal

__all__ = ["ending_signals"]


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT (Ctrl-C) and SIGHUP (the terminal closed), the last unless it is ignored, as by nohup."""
    asked = (signal.SIGTERM, signal.SIGINT)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)
