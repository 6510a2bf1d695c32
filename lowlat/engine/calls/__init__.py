"""Calls of a program in whose process the runtime is: a thread that steps it, streams of chunks, whole answers."""
