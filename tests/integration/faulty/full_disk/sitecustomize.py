"""A node whose disks are full."""

import os

statvfs = os.statvfs


def full(path):
    seen = statvfs(path)
    return seen if os.fspath(path) == "/dev/shm" else os.statvfs_result((*seen[:3], 0, 0, *seen[5:]))


os.statvfs = full
