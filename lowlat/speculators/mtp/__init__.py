"""Method "mtp" drafts with a target's own multi-token prediction layer, whose weights lie in the target's files."""
