"""This package emits the decode step and prefill as Programs, and declares the state that outlives a step."""
