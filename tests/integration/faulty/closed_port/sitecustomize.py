"""A node on which nothing listens, though programs believe that it does: who connects is refused."""

import socket

socket.socket.listen = lambda self, backlog=128: None
socket.socket.accept = lambda self: __import__("time").sleep(3600)
