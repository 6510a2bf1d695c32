"""What tests over sockets share."""

from socket_fixtures import listen, no_leaks, serve, transport

__all__ = ["listen", "no_leaks", "serve", "transport"]
