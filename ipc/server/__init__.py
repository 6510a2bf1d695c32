"""The server: takes requests over sockets, has them decoded, and streams what they bring; it knows no model."""

from lowlat.ipc.server.server import Server
from lowlat.ipc.server.transport.security import Curve

__all__ = ["Curve", "Server"]
