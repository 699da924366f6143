"""A storage that lies about the order of fsync: everybody sees what was renamed, but its bytes are not kept until later. When
the process that wrote them is killed, what it renamed last has lost them."""

import os

LAST = 8
rename = os.rename
keepers = {}


def lying_rename(source, target, **options):
    rename(source, target, **options)
    if os.getpid() not in keepers:
        reading, keepers[os.getpid()] = os.pipe()
        if os.fork() == 0:
            os.close(keepers[os.getppid()])
            lose(reading)
        os.close(reading)
    os.write(keepers[os.getpid()], os.fsencode(target) + b"\n")


def lose(reading):
    try:
        with open(reading, "rb") as file:
            renamed = [os.fsdecode(line.rstrip(b"\n")) for line in file.readlines()[-LAST:]]
        for path in renamed:
            files = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]
            for name in files:
                if os.path.isfile(name):
                    os.truncate(name, 0)
    finally:
        os._exit(0)


os.rename = lying_rename
