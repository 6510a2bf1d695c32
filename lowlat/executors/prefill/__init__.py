"""A chunk of a prompt on a GPU: torch's products and attention, our kernels for the rest, captured.

`chunk` runs a chunk's operations, each by what the other modules make of it; `graphs` captures it. `memory` and `room`
say beforehand what it takes, and know no kernel.
"""
