"""A step's bookkeeping on the device: its beginning, acceptance and commit, publication.

It knows tokens and lengths, and neither logits nor models.
"""
