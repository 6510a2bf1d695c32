"""This package has the figures of steps: counters, strict mode's checks, attention's tiles, traces, the summary."""
