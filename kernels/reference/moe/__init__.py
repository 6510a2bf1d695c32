"""References of MoE layers' operations."""
