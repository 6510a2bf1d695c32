"""The server takes requests over sockets, has them decoded, and streams their tokens."""

from lowlat.ipc.server.admission import Curve
from lowlat.ipc.server.server import Server

__all__ = ["Curve", "Server"]
