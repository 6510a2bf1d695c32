"""The requests of a server: how text becomes token ids, who waits, what streams, when each one ends."""
