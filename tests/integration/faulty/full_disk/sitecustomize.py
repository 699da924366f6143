"""A node whose disks are full: who asks how much is free is told so, and who tries to write a temporary file finds no place."""

import errno
import os
import tempfile

statvfs = os.statvfs


def full(path):
    seen = statvfs(path)
    return seen if os.fspath(path) == "/dev/shm" else os.statvfs_result((*seen[:3], 0, 0, *seen[5:]))


os.statvfs = full


def nowhere():
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")


tempfile.gettempdir = nowhere
