"""The HTTP gateway offers OpenAI's interface, metrics and a page, in a process of its own before a running server.

It is a client of that server like any other. It needs the extra `lowlat[http]`.
"""

__all__: list[str] = []
