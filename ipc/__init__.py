"""Bytes and sockets: the place of the wire format, the server and the clients.

Nothing is served yet: this version decodes in the caller's own process, through `lowlat.Runtime`, and this
folder holds no code. It is installed all the same, so that its name and its rule stand from the start: it
knows nothing about models, and importing it loads neither torch, nor NumPy, nor Numba.
"""

__all__: list[str] = []
