"""A storage that has no rename: it copies, and removes what it copied."""

import os
import shutil
import time

SLOWLY_S = 0.002


def copy(source, target, **options):
    if os.path.isdir(source):
        shutil.copytree(source, target, copy_function=copy_file)
        shutil.rmtree(source)
    else:
        copy_file(source, target)
        os.unlink(source)


def copy_file(source, target):
    with open(source, "rb") as whole, open(target, "wb", buffering=0) as part:
        data = whole.read()
        part.write(data[: len(data) // 2])
        time.sleep(SLOWLY_S)
        part.write(data[len(data) // 2 :])


os.rename = copy
