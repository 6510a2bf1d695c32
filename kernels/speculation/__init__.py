"""Kernels of speculation: acceptance, draft rows, drafts from text, draft lengths, and dynamic trees."""
