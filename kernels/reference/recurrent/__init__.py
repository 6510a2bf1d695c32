"""References of gated delta nets: convolution, recurrence, gated norm, and states that rewinding leaves exact."""
