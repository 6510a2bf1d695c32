"""This package emits the decode step and prefill as Programs, and has the state that outlives a step."""
