"""This package chooses a step's bucket by drafts, forced text or proposals, and learns the costs of draft lengths."""
