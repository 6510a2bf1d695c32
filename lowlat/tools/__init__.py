"""Tools that the runtime never imports: comparison, profiling, tools for draft models."""
