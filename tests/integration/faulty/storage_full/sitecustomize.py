"""A storage that is full: files can be made, and nothing put into them."""

import errno
import os
import stat

write = os.write


def write_nothing(descriptor, data):
    if stat.S_ISREG(os.fstat(descriptor).st_mode) and not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(descriptor, data)


os.write = write_nothing
