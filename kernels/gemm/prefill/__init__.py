"""GEMMs of hundreds of rows, with K in fixed segments whose sums are added in order.

They use wgmma, for capability 9.0. With narrow weights they use mma.sync, for all capabilities.
"""
