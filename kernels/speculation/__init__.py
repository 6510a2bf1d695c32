"""Kernels of speculation: acceptance and commit, draft rows, dynamic trees, drafts from text, draft lengths."""
