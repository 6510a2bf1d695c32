"""One launch of a loaded kernel on a stream or into a graph under construction. It knows no kernel by name."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Launch"]


@dataclass(frozen=True)
class Launch:
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
