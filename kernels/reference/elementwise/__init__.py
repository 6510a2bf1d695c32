"""References of row-wise operations: norms, embeddings, activations, rotary embedding, a draft model's rows."""
