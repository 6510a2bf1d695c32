"""The files of draft models have these parts in common, whatever their method: tensors, sizes, windows, weights."""
