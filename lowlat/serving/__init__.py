"""A Runtime behind the server: adapters of engine and text, configuration, logs. Import the modules themselves.

Nothing here knows sockets, and nothing of `lowlat.ipc` knows this.
"""

__all__: list[str] = []
