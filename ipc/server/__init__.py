"""The server receives requests over sockets, lets an engine decode them, and streams their tokens."""

from lowlat.ipc.server.admission import Curve
from lowlat.ipc.server.server import Server

__all__ = ["Curve", "Server"]
