"""A Runtime after the server: adapters of engine and text, configuration, logs. Import the modules themselves.

Nothing here knows sockets but `http`, the HTTP gateway, which is a process of its own and knows no Runtime; and nothing
of `lowlat.ipc` knows this.
"""

__all__: list[str] = []
