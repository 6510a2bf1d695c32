"""A mixture of experts of few rows: top-k routing, both GEMMs and the sum over ranks in one launch."""
