"""Tools that the runtime never imports: comparison, profiling, training, tools for draft models."""
