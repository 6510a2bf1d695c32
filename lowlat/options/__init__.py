"""What a caller asks for: options of a runtime, sampling parameters, outputs. Nothing here knows a model."""
