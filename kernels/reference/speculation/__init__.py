"""References of speculation: acceptance and commit, draft rows, trees, drafts from text, draft lengths."""
