"""Fixtures that tests over sockets share."""

from socket_fixtures import no_leaks, serve, server, soon, transport

__all__ = ["no_leaks", "serve", "server", "soon", "transport"]
