"""The decode step and prefill as Programs, and the state that outlives a step."""
