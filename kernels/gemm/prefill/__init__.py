"""GEMMs of hundreds of rows: by wgmma for capability 9.0, K in fixed segments, the segments' sums added in order; with
narrow weights by mma.sync, in the same way, for all capabilities.
"""
