"""This package chooses a step's bucket by what is drafted, forced or proposed, and learns what draft lengths cost."""
