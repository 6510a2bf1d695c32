"""Speculators: the interface (base), the methods by name (methods), EAGLE3, P-EAGLE, DFlash, n-gram drafts, and
the trees they draft.
"""
