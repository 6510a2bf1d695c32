"""A launch runs a loaded kernel, or a library's operations, on a stream, or records them into a graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KernelLaunch", "Launch", "LibraryLaunch"]


@dataclass(frozen=True)
class KernelLaunch:
    """A loaded kernel, its configuration and its marshalled arguments, ready to be issued any number of times.

    name       for profiles and audits
    kernel     a cuda.core Kernel
    config     a cuda.core LaunchConfig
    arguments  ctypes values and integers, in the order of the kernel's parameters
    """

    name: str
    kernel: Any
    config: Any
    arguments: tuple[Any, ...]

    def issue(self, target: Any) -> None:
        """Launch on a cuda.core Stream, or record into a GraphBuilder."""
        from cuda.core import launch

        launch(target, self.config, self.kernel, *self.arguments)


@dataclass(frozen=True)
class LibraryLaunch:
    """A call of torch's operations on torch's current stream, which must be the target of `issue`.

    function  called with `arguments`; it must not wait for the device
    """

    name: str
    function: Callable[..., None]
    arguments: Mapping[str, Any]

    def issue(self, target: Any) -> None:
        """Run on torch's current stream; if that stream is being captured, the graph records the launches."""
        with torch.inference_mode():
            self.function(**self.arguments)


Launch = KernelLaunch | LibraryLaunch
