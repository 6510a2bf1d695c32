"""This package handles a server's requests: it tokenizes, queues, admits, streams and ends them."""
