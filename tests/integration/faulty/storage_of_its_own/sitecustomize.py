"""A storage that this process alone has: a file system in memory, mounted on $CHAOSRUN_TEST_STORAGE in a mount namespace of its
own, with the options of $CHAOSRUN_TEST_MOUNT (size=64k, ro)."""

import ctypes
import os

CLONE_NEWNS = 1 << 17
MS_RDONLY, MS_REC, MS_PRIVATE = 1, 1 << 14, 1 << 18
libc = ctypes.CDLL(None, use_errno=True)


def done(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


options = os.environ.get("CHAOSRUN_TEST_MOUNT", "")
flags, data = (MS_RDONLY, None) if options == "ro" else (0, options.encode())
done(libc.unshare(CLONE_NEWNS))
done(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
done(libc.mount(b"none", os.environ["CHAOSRUN_TEST_STORAGE"].encode(), b"tmpfs", flags, data))
