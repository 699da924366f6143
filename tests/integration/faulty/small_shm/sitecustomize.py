"""A container whose /dev/shm has 512 KiB."""

import os

statvfs = os.statvfs


def small(path):
    seen = statvfs(path)
    if os.fspath(path) != "/dev/shm":
        return seen
    blocks = (512 << 10) // seen.f_frsize
    return os.statvfs_result((seen.f_bsize, seen.f_frsize, blocks, blocks, blocks, *seen[5:]))


os.statvfs = small
