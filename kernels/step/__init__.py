"""A step's bookkeeping on the device: its beginning, acceptance and commit, publication."""
