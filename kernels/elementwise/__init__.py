"""Row-wise kernels: norms, embeddings, sums, activations, rotary embedding, a draft model's input."""
