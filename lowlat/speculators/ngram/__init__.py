"""N-gram drafts (prompt lookup): drafts copied from a request's own text, without a draft model or a checkpoint."""
