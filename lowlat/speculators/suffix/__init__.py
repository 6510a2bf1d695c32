"""Suffix drafts are the most frequent continuations of a text's endings in a request's own text."""
