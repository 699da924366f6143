"""Nodes that meet in one storage, if it is one: each makes a folder of its own there and looks for those of the others.

They look for names that they know beforehand, in folders that they open anew: a client of NFS asks its server again about a
directory that is opened, and for a while says of another what it knows. Of those that have met, the first lends its folder for
what all wait for together; then they send each other files. No clock of another node is needed: how long a file takes to be
seen is half of there and back.
"""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from msgspec import Struct

from chaosrun.cluster.guard import PREFIX
from chaosrun.preflight.probes.forked import Report, Watched, watched
from chaosrun.preflight.probes.storage_place import Mount, mount_of, nearest_folder, own_folder
from chaosrun.records.filesystem import Filesystem

PAYLOAD_BYTES = 60_000
MEET_POLL_S = 0.01
NODE_POLL_S = 0.001
"""A node that is looked for adds so much to the time between two looks: many nodes do not keep the server busy."""
RING_POLL_S, RING_SHARE = (0.0005, 0.05), 0.1
"""A file that has not come is looked for again after a share of the time that it has taken."""
TOLD = 5
_HEAD = 16
GONE = frozenset({errno.ENOENT, errno.ESTALE})


class Meeting(Struct, frozen=True, kw_only=True):
    met: list[int]
    """Numbers of the nodes that it saw, its own among them."""
    arrived_s: float
    """By this node's clock, as `left_s`."""
    left_s: float


class Ring(Struct, frozen=True, kw_only=True):
    """Files for the next node, each answered when it was seen, and answers to those of the one before."""

    peer: int
    there_and_back_s: list[float]
    torn: list[tuple[int, str]]
    """Of which node what was seen in part."""
    answered: bool
    """Whether the last one was."""
    waited_s: float
    """For its answer."""


class SharedFacts(Watched, frozen=True, kw_only=True):
    mount: Mount | None = None
    meeting: Meeting | None = None
    gathered_s: float | None = None
    """How long it waited for the others; None also where the first node had left, without having seen this one."""
    ring: Ring | None = None


def probe(
    *,
    storage: str,
    token: str,
    me: int,
    number: int,
    meet_s: float,
    rounds: int,
    ring_s: float,
    wait_s: float,
    patience_s: float,
    limit_s: float,
) -> SharedFacts:
    """`me` is this node's number, `number` that of the nodes; the others say how much is tried, and for how long."""

    def steps(report: Report) -> None:
        with ExitStack() as stack:
            if (mount := report("mount", lambda: mount_of(nearest_folder(Path(storage))))) is None:
                return
            exchange = Exchange(base=Path(mount.base), token=token, me=me, number=number, goes_on=report.goes_on)

            def meet() -> Meeting:
                stack.enter_context(own_folder(exchange.folder(me)))
                return exchange.meet(meet_s)

            if report("meeting", meet) is not None and len(exchange.met) > 1:
                report("gathered_s", lambda: exchange.gather(wait_s))
                if exchange.together:
                    report("ring", lambda: exchange.ring(rounds, ring_s, ring_s + wait_s))
                report("leaving", lambda: exchange.leave(wait_s))

    return watched(steps, SharedFacts, patience_s=patience_s, limit_s=limit_s)


@dataclass(slots=True)
class Exchange:
    base: Path
    token: str
    me: int
    number: int
    goes_on: Callable[[], None]
    """Called as the storage answers."""
    met: list[int] = field(default_factory=list)
    together: bool = False
    """Whether the first node has seen all that it met do what all do."""
    _over_s: float = 0.0
    """When the others have stopped looking too."""
    _disk: Filesystem = field(default_factory=Filesystem)

    @property
    def common(self) -> Path:
        return self.folder(self.met[0])

    def meet(self, limit_s: float) -> Meeting:
        """Returns when all have been seen, or after the limit."""
        arrived_s, self._over_s = time.time(), time.monotonic() + limit_s
        self._put("here")
        unseen = self._await({number: self.folder(number) / "here" for number in range(self.number)}, limit_s)
        self.met = [number for number in range(self.number) if number not in unseen]
        return Meeting(met=self.met, arrived_s=arrived_s, left_s=time.time())

    def gather(self, limit_s: float) -> float | None:
        """Wait until all that have met are ready to send files; returns for how long."""
        began_s = time.monotonic()
        try:
            self.together = self._wait_for_all("ready", limit_s)
        except OSError as error:
            if error.errno in GONE and self._has_left(self.met[0]):
                return None
            raise
        return None if not self.together and self._has_left(self.met[0]) else time.monotonic() - began_s

    def ring(self, rounds: int, budget_s: float, limit_s: float) -> Ring:
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
                    before_done = _there(self.folder(before) / "finished") or self._has_left(before)
            self.goes_on()
            if done != (len(taken), replies, finished):
                progress_s = time.monotonic()
            shortest_s, longest_s = RING_POLL_S
            time.sleep(min(longest_s, max(shortest_s, RING_SHARE * (time.monotonic() - progress_s))))
        waited_s = 0.0 if sent_s is None else time.monotonic() - sent_s
        return Ring(peer=peer, there_and_back_s=taken, torn=torn[:TOLD], answered=sent_s is None, waited_s=waited_s)

    def leave(self, limit_s: float) -> None:
        """The folder that was lent goes last; and none while another may still look for it."""
        if self.together:
            # The first one may have waited long enough meanwhile.
            with suppress(FileNotFoundError):
                self._wait_for_all("done", limit_s, wait=self.me == self.met[0])
        while (left_s := self._over_s - time.monotonic()) > 0 and not (self.together and len(self.met) == self.number):
            self.goes_on()
            time.sleep(min(left_s, 0.1))

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

    def _await(self, paths: Mapping[int, Path], limit_s: float) -> set[int]:
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

    def folder(self, number: int) -> Path:
        return self.base / f"{PREFIX}{self.token}-{number}"

    def _has_left(self, number: int) -> bool:
        _open_anew(self.base)
        return not self.folder(number).exists()

    def _put(self, name: str, number: int = 0) -> None:
        self._disk.write_durably(self.folder(self.me) / name, payload(number, PAYLOAD_BYTES))

    def _saw(self, whose: int, name: str, number: int, torn: list[tuple[int, str]]) -> bool:
        """Whether the file is there, whole. One that is seen in part is written down, and looked at again."""
        path = self.folder(whose) / name
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


def payload(number: int, size: int) -> bytes:
    """Bytes that say which they are and whether they are whole."""
    body = number.to_bytes(8, "little") + size.to_bytes(8, "little") + Random(number).randbytes(size)
    return body + hashlib.sha256(body).digest()


def number_in(data: bytes) -> int | None:
    """The number of a whole payload."""
    size = int.from_bytes(data[8:_HEAD], "little")
    whole = len(data) == _HEAD + size + 32 and hashlib.sha256(data[:-32]).digest() == data[-32:]
    return int.from_bytes(data[:8], "little") if whole else None
