"""This package has the threads of a server, the events between them, and a watchdog."""
