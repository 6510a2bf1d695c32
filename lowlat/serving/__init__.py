"""This package connects a Runtime with the server: adapters for engine and text, configuration, logs.

`http` is the HTTP gateway, a separate process that sends requests to the Runtime through `lowlat.ipc`.
"""

__all__: list[str] = []
