"""GEMMs of 1 to 64 rows: mma.sync, weights streamed past L1, prologues and epilogues fused."""
