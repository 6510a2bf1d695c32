"""The memory of a runtime: what it will allocate, the KV blocks, and the prefixes that requests share.

It touches no device.
"""
