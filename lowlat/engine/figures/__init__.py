"""This package counts and reports on steps: counters, strict mode's checks, attention tiles, traces, the summary."""
