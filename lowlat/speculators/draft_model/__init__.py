"""Method "draft_model" drafts with a whole model of the target's vocabulary, which has layers and a KV of its own."""
