"""Figures of steps: counters, checks of strict mode, tiles of attention, debug traces, blocks of the summary."""
