"""Chat templates: rendered apart, looked at, and helped where they take no tools; the tags that they write."""
