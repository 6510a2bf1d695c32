"""This package has a server's requests: how text becomes token ids, who waits, what streams, when each one ends."""
