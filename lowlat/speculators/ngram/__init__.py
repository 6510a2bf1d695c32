"""N-gram drafts (prompt lookup): drafts copied from the request's own text. There is no draft model and no checkpoint."""
