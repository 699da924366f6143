"""A client that keeps what it knows of a directory, until it changes that itself. $CHAOSRUN_TEST_KEPT says what: its "entries",
or also "names" that were not there, however they are asked for. With $CHAOSRUN_TEST_AFTER, the storage, it comes when another
node has looked for it there."""

import glob
import os
import time

KEPT = os.environ["CHAOSRUN_TEST_KEPT"]
if "CHAOSRUN_TEST_AFTER" in os.environ:
    while not glob.glob(os.environ["CHAOSRUN_TEST_AFTER"] + "/.chaosrun-preflight-*/here"):
        time.sleep(0.01)
    time.sleep(0.5)
entries = {}
not_there = set()
really = {name: getattr(os, name) for name in ("listdir", "stat", "open", "mkdir", "rename")}


def known(path):
    return ".chaosrun-preflight-" in str(path)


def changed(path):
    folder = os.path.dirname(str(path))
    entries.pop(folder, None)
    not_there.difference_update([name for name in not_there if os.path.dirname(name) == folder])


def listdir(path="."):
    if str(path) not in entries:
        entries[str(path)] = really["listdir"](path)
    return entries[str(path)]


def looking(act):
    def look(path, *rest, **options):
        name = str(path)
        if name in not_there:
            raise FileNotFoundError(2, os.strerror(2), name)
        try:
            return act(path, *rest, **options)
        except FileNotFoundError:
            if KEPT == "names" and known(path):
                not_there.add(name)
            raise

    return look


def changing(act):
    def change(path, *rest, **options):
        result = act(path, *rest, **options)
        for name in (path, *rest[:1]):
            changed(name)
        return result

    return change


def opening(path, flags, *rest, **options):
    if flags & os.O_CREAT:
        return changing(really["open"])(path, flags, *rest, **options)
    return looking(really["open"])(path, flags, *rest, **options)


os.listdir = listdir
os.stat = looking(really["stat"])
os.open = opening
os.mkdir = changing(really["mkdir"])
os.rename = changing(really["rename"])
