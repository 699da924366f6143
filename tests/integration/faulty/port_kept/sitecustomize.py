"""A node on which somebody takes every port that is asked for by its number, just before."""

import socket

_bind = socket.socket.bind
_kept = []


def bind(self, address):
    if isinstance(address, tuple) and address[1] and not _kept:
        thief = socket.socket(self.family, self.type)
        # As the fork server does, or the connections that a killed worker had would be in its way.
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(thief, address)
        thief.listen()
        _kept.append(thief)
    return _bind(self, address)


socket.socket.bind = bind
