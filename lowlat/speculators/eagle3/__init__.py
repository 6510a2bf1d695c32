"""This package reads EAGLE3 draft models, and emits their operations in prefill and in a step."""
