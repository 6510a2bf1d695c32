"""This package plans a runtime's memory, says what it holds, and keeps requests without a slot in host memory."""
