"""The HTTP gateway offers OpenAI's API, metrics and a chat page, in a separate process in front of a running server.

It is a client of that server like any other. It needs the extra `lowlat[http]`.
"""

__all__: list[str] = []
