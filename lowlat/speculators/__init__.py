"""Speculators: the interface (base), the methods by name (methods), EAGLE3, P-EAGLE, DFlash, n-gram drafts, and
the trees they draft.

It knows neither the step's acceptance nor the host; executors see no more of it than the operations it emits.
"""
