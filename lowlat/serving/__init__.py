"""This package connects a Runtime with the server: adapters of engine and text, configuration, logs.

`http` is the HTTP gateway, a process of its own that reaches the Runtime by `lowlat.ipc`.
"""

__all__: list[str] = []
