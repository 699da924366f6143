"""A client that sees a file before its bytes: as long as it will be, and all zeros."""

import pathlib

read_bytes = pathlib.Path.read_bytes


def zeros(self):
    return bytes(len(read_bytes(self)))


pathlib.Path.read_bytes = zeros
