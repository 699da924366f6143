"""A node whose network drops what it sends and what comes in: it connects to nobody, and nobody gets an answer."""

import socket
import time

_connect = socket.socket.connect


def connect(self, address):
    if self.type == socket.SOCK_DGRAM:
        return _connect(self, address)
    time.sleep(self.gettimeout() or 3600)
    raise TimeoutError("timed out")


socket.socket.connect = connect
# What the kernel accepts for it waits in vain.
socket.socket.accept = lambda self: time.sleep(3600)  # pyright: ignore[reportAttributeAccessIssue]
