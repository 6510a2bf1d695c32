"""One operation a file, each beside the reference that says what it means; nothing about requests."""
