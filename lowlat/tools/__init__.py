"""This package has tools that the runtime never imports: comparison, profiling, tools for draft models."""
