"""GEMMs of hundreds of rows for capability 9.0: wgmma, K in fixed segments, the segments' sums added in order."""
