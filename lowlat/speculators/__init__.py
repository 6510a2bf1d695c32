"""Speculators propose tokens that the target's step verifies. Acceptance belongs to none of them."""
