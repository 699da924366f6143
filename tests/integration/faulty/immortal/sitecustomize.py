"""A node on which SIGKILL is lost on its way, but for the guard that ends it all."""

import os
import signal
import sys

_kill, _killpg = os.kill, os.killpg


def _lost(send):
    return lambda target, number, *rest: None if number == signal.SIGKILL else send(target, number, *rest)


if "chaosrun.cluster.probe_guard" not in sys.orig_argv:
    os.kill, os.killpg = _lost(_kill), _lost(_killpg)
    signal.pidfd_send_signal = _lost(signal.pidfd_send_signal)
