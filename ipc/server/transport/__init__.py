"""The sockets of a server: its listeners, who may connect to them, and how much a client may say.

They know no request.
"""
