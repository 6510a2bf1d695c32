"""EAGLE3: draft models from their checkpoints, and their operations in prefill and in a step."""
