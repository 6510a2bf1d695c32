"""N-gram drafts (prompt lookup) are copied from a request's own text, without a draft model."""
