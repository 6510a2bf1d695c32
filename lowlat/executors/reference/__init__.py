"""The reference executor runs one rank, or several that one device runs in turn."""

from lowlat.executors.reference.executor import ReferenceExecutor, bind, meaning_of

__all__ = ["ReferenceExecutor", "bind", "meaning_of"]
