"""Nodes that meet in one storage, if it is one: each makes a folder of its own there and looks for those of the others.

They look for names that they know beforehand, in folders that they open anew: a client of NFS asks its server again about a
directory that is opened, and for a while says of another what it knows. Of those that have met, the first lends its folder for
what all do together. No clock of another node is needed: how long a file takes to be seen is half of there and back.
"""

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaosrun.cluster.guard import PREFIX
from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.storage_kills import number_in, payload
from chaosrun.preflight.probes.storage_promises import created
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.locks import is_locked

PAYLOAD_BYTES = 60_000
MEET_POLL_S, EACH_S = 0.01, 0.001
NODE_POLL_S = 0.001
"""A node that is looked for adds so much to the time between two looks: many nodes do not keep the server busy."""
RING_POLL_S, RING_SHARE = (0.0005, 0.05), 0.1
"""A file that has not come is looked for again after a share of the time that it has taken."""
TOLD = 5
GONE = frozenset({errno.ENOENT, errno.ESTALE})


def folder_of(token: str, number: int) -> str:
    return f"{PREFIX}{token}-{number}"


@dataclass(slots=True)
class Exchange:
    base: Path
    token: str
    me: int
    number: int
    """Of nodes that are asked to meet."""
    goes_on: Callable[[], None] = lambda: None
    """Called as the storage answers."""
    met: tuple[int, ...] = ()
    _disk: Filesystem = field(default_factory=Filesystem)
    _over_s: float = 0.0
    """When the others have stopped looking too."""
    together: bool = False
    """Whether the first node has seen all that it met do what all do."""

    @property
    def own(self) -> Path:
        return self._folder(self.me)

    @property
    def common(self) -> Path:
        return self._folder(self.met[0])

    def meet(self, limit_s: float) -> Facts:
        """{met: numbers, arrived_s, left_s: by this node's clock}. Returns when all have been seen, or after the limit."""
        arrived_s, self._over_s = time.time(), time.monotonic() + limit_s
        self._put("here")
        unseen = self._await({number: self._folder(number) / "here" for number in range(self.number)}, limit_s)
        self.met = tuple(number for number in range(self.number) if number not in unseen)
        return {"met": self.met, "arrived_s": arrived_s, "left_s": time.time()}

    def compete(self, names: int, limit_s: float) -> Facts:
        """Every node creates the same names: {won: those that this one made, again: those that it could make once more when
        all were there, names, waited_s: for that}; and tries the lock that the first
        node holds: {refused: None for that one}. {left: True} when that one has not seen this node, and has gone."""
        try:
            refused = None if self.me == self.met[0] else is_locked(self.common / "lock")
            # From both ends, so that they come by each other's.
            order = range(names) if self.met.index(self.me) % 2 == 0 else range(names - 1, -1, -1)
            won: list[int] = []
            for number in order:
                if created(self.common / f"name-{number}"):
                    won.append(number)
                self.goes_on()
                time.sleep(EACH_S)
            tried_s = time.monotonic()
            self.together = self._wait_for_all("tried", limit_s)
            waited_s = time.monotonic() - tried_s
            again = [number for number in order if self.together and created(self.common / f"name-{number}")]
        except OSError as error:
            if error.errno in GONE and self._has_left(self.met[0]):
                return {"left": True}
            raise
        if not self.together and self._has_left(self.met[0]):
            return {"left": True}
        return {"won": won, "again": again, "names": names, "refused": refused, "waited_s": waited_s}

    def leave(self, limit_s: float) -> None:
        """The folder that was lent goes last; and none while another may still look for it."""
        if self.together:
            # The first one may have waited long enough meanwhile.
            with suppress(FileNotFoundError):
                self._wait_for_all("done", limit_s, wait=self.me == self.met[0])
        while (left_s := self._over_s - time.monotonic()) > 0 and not (self.together and len(self.met) == self.number):
            self.goes_on()
            time.sleep(min(left_s, 0.1))

    def ring(self, rounds: int, budget_s: float, limit_s: float) -> Facts:
        """Files for the next node, each answered when it is seen, and answers to those of the one before: {peer,
        there_and_back_s: of each, torn: of whom what was seen in part, answered: whether the last one was, waited_s: for that}.
        """
        place = self.met.index(self.me)
        peer, before = self.met[(place + 1) % len(self.met)], self.met[place - 1]
        begun_s = progress_s = time.monotonic()
        taken: list[float] = []
        torn: list[tuple[int, str]] = []
        sent_s: float | None = None
        replies, before_done, finished = 0, False, False
        while (now_s := time.monotonic()) < begun_s + limit_s and not (finished and before_done):
            done = len(taken), replies, finished
            if not finished and sent_s is None:
                if len(taken) == rounds or (taken and now_s - begun_s > budget_s):
                    self._put("finished")
                    finished = True
                else:
                    sent_s = time.monotonic()
                    self._put(f"ask-{len(taken)}", len(taken))
            if sent_s is not None and self._saw(peer, f"answer-{len(taken)}", len(taken), torn):
                taken.append(time.monotonic() - sent_s)
                sent_s = None
            if not before_done:
                if self._saw(before, f"ask-{replies}", replies, torn):
                    self._put(f"answer-{replies}", replies)
                    replies += 1
                else:
                    before_done = _there(self._folder(before) / "finished") or self._has_left(before)
            self.goes_on()
            if done != (len(taken), replies, finished):
                progress_s = time.monotonic()
            shortest_s, longest_s = RING_POLL_S
            time.sleep(min(longest_s, max(shortest_s, RING_SHARE * (time.monotonic() - progress_s))))
        waited_s = 0.0 if sent_s is None else time.monotonic() - sent_s
        return {
            "peer": peer,
            "there_and_back_s": taken,
            "torn": torn[:TOLD],
            "answered": sent_s is None,
            "waited_s": waited_s,
        }

    def _wait_for_all(self, mark: str, limit_s: float, *, wait: bool = True) -> bool:
        """Say that this node has come so far, and wait until the first one has seen it of every one."""
        (self.common / f"{mark}-{self.me}").touch()
        everyone = self.common / f"all-{mark}"
        if not wait:
            return True
        if self.me != self.met[0]:
            return not self._await({self.met[0]: everyone}, limit_s)
        if self._await({number: self.common / f"{mark}-{number}" for number in self.met}, limit_s):
            return False
        everyone.touch()
        return True

    def _await(self, paths: dict[int, Path], limit_s: float) -> set[int]:
        """Those that are not there within the limit."""
        deadline = time.monotonic() + limit_s
        unseen = dict(paths)
        while True:
            _open_anew(self.base)
            unseen = {number: path for number, path in unseen.items() if not _there(path)}
            self.goes_on()
            left_s = deadline - time.monotonic()
            if not unseen or left_s <= 0:
                return set(unseen)
            time.sleep(min(left_s, MEET_POLL_S + NODE_POLL_S * len(unseen)))

    def _folder(self, number: int) -> Path:
        return self.base / folder_of(self.token, number)

    def _has_left(self, number: int) -> bool:
        _open_anew(self.base)
        return not self._folder(number).exists()

    def _put(self, name: str, number: int = 0) -> None:
        self._disk.write_durably(self.own / name, payload(number, PAYLOAD_BYTES))

    def _saw(self, whose: int, name: str, number: int, torn: list[tuple[int, str]]) -> bool:
        """Whether the file is there, whole. One that is seen in part is written down, and looked at again."""
        path = self._folder(whose) / name
        if not _there(path):
            return False
        try:
            data = path.read_bytes()
        except OSError as error:
            if error.errno not in GONE:
                torn.append((whose, f"{name}: {error.strerror}"))
            return False
        if number_in(data) != number:
            torn.append((whose, f"{name}: {len(data)} bytes that are not what was written"))
            return False
        return True


def _open_anew(folder: Path) -> None:
    os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _there(path: Path) -> bool:
    try:
        _open_anew(path.parent)
        os.stat(path)
    except OSError as error:
        if error.errno not in GONE:
            raise
        return False
    return True
