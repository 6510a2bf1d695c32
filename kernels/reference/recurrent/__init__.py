"""What gated delta nets mean: convolution, recurrence, gated norm, and states that rewinding leaves exact."""
