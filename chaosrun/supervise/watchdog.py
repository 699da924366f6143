"""Kills a process that supervises a drill when it cannot end by itself: Ray's head (gcs_server), or the only node (raylet) of a
private Ray, is gone, or its time is over.

Without its head Ray blocks for a minute, in C++ and perhaps with the GIL held, and then ends the process. So the parent process
watches it and kills it at once when the head dies, or when it should have ended and Ray holds it up. What it had done is in the
run's files.
"""

import signal
import socket
import threading
import time

from chaosrun.processes import ProcessIdentity, child_called, children, identify, send_signal, state_of, wait_gone

LOOK_EVERY_S = 0.2
ANSWER_S = 1.0
"""For a head on another machine to take a connection."""
SILENT_LOOKS = 3
"""So many looks in a row without an answer: then a joined Ray's head is lost."""
CLEAN_UP_S = 10.0
"""How long the cleanup process of a private Ray may take once its driver is gone."""


class Watchdog:
    """Watches one supervising process; use as a context manager while listening to that process."""

    def __init__(self, pid: int, limit_s: float | None = None) -> None:
        """`limit_s`: when the process must have ended, wall clock."""
        self.lost: str | None = None
        """In words, how Ray's head was lost, for which the process was killed."""
        self.overdue = False
        """The process was killed because its time was over."""
        self.limit_s = limit_s
        self.head: ProcessIdentity | None = None
        """The head's process of a private Ray, once it has been found."""
        self.node: ProcessIdentity | None = None
        """Likewise, that of its only node."""
        self._pid = pid
        self._address: tuple[str, int] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaosrun-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def joined(self, address: str) -> None:
        """It joined an existing Ray, whose head listens at this address."""
        host, _, port = address.rpartition(":")
        self._address = (host.strip("[]"), int(port))

    def _watch(self) -> None:
        supervisor = identify(self._pid)
        while supervisor is not None and not self._over.wait(LOOK_EVERY_S):
            if self.limit_s is not None and time.time() > self.limit_s:
                self.overdue = True
                return _end(supervisor)
            self.head = self.head or child_called("gcs_server", self._pid)
            self.node = self.node or child_called("raylet", self._pid)
            for what, program, process in (("head", "gcs_server", self.head), ("node", "raylet", self.node)):
                if process is None or wait_gone([process], timeout_s=LOOK_EVERY_S):
                    continue
                self._over.wait(LOOK_EVERY_S)
                if state_of(process) == "Z":
                    self.lost = f"Ray's {what} ({program}, process {process.pid}) has died"
                    return _end(supervisor)
                if process is self.head:
                    return  # reaped by a parent that ended it in order, last of its Ray
            if self._address is not None and not self._answers(self._address):
                host, port = self._address
                self.lost = f"Ray's head at {host}:{port} has died: nobody listens there any more"
                return _end(supervisor)

    def _answers(self, address: tuple[str, int]) -> bool:
        """Whether one of several attempts to connect succeeds; Also True once watching is over."""
        for _ in range(SILENT_LOOKS):
            try:
                socket.create_connection(address, timeout=ANSWER_S).close()
            except OSError:
                self._over.wait(ANSWER_S / 2)
            else:
                self._over.wait(ANSWER_S)
                return True
        return self._over.is_set()


def _end(supervisor: ProcessIdentity) -> None:
    """Kill the supervisor and wait for the processes below it: Ray's, and the one that cleans up after them."""
    below = [identity for child in children(supervisor.pid) if (identity := identify(child))]
    send_signal(supervisor, signal.SIGKILL)
    wait_gone(below, timeout_s=CLEAN_UP_S)
