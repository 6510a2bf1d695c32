"""This package is the host's side of a step: the commands that it writes, and the publications that it reads."""
