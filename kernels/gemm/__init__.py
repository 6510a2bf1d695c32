"""GEMMs with packed weights: `decode` for a step's rows, `prefill` for hundreds."""
