"""A storage on which exclusive creation is not: a file that is there is opened."""

import os

open_strictly = os.open


def open_loosely(path, flags, *arguments, **options):
    return open_strictly(path, flags & ~os.O_EXCL, *arguments, **options)


os.open = open_loosely
