"""The check "shared storage": do the nodes share one storage, and do they see each other's files as written?

Every node writes a file (`probe`); after that, every node looks for the others' files.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from msgspec import Struct, structs

from chaosrun.cluster.probe_guard import PREFIX
from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.storage import IN_MEMORY, no_answer
from chaosrun.preflight.model import Answers, Check, Finding, Level, Pool, Rows, Setting, Status, ask
from chaosrun.preflight.placement import nodes_used
from chaosrun.preflight.probes.seen import SeenFiles
from chaosrun.preflight.probes.storage_place import Mount, StorageFailure
from chaosrun.wording import count, duration, listed

ROWS = Rows(check="shared storage", name="same storage")
WAIT_S = {Level.QUICK: 3.0, Level.STANDARD: 10.0, Level.DEEP: 65.0}
"""How long a node looks for files that it does not see."""
LIMIT_S = 30.0
"""Limit for operations that need no waiting."""
LINES = 2000
"""Of text in a file: it fills many pages."""
LATEST_SEEN_S = 1.0
"""A restarted rank looks for its checkpoint within a second of the death of the one before."""
PATIENT_S = 60.0
"""A client of NFS keeps what it knows of a directory for at most so long, unless it was told otherwise (acdirmax)."""
OF_ONE_NODE = IN_MEMORY | {"overlay"}
_EVERYONE = "files of every other node"
_AGAIN = "see what keeps the node busy, and ask again"
_LATE = "let clients keep what they know of directories for less long (NFS: actimeo), or expect restores to miss a save"


class Written(Struct, frozen=True, kw_only=True):
    mount: Mount | None = None
    """Where the node wrote its file; None: it could not."""
    failed: StorageFailure | None = None


class Shared(Struct, frozen=True, kw_only=True):
    """The nodes' answers; a single node is not probed."""

    files: dict[str, str] = {}
    """Each node's own file, below the storage."""
    written: Answers[Written] = Answers(answered={}, unanswered={})
    looked: Answers[SeenFiles] = Answers(answered={}, unanswered={})

    def mount(self, name: str) -> Mount | None:
        return self.written.answered[name].mount if name in self.written.answered else None

    def path(self, name: str, other: str) -> str:
        """The path of another node's file on a node, if they share the storage."""
        mount = self.mount(name)
        return str(PurePath(mount.base if mount else "/") / self.files[other])


def gather(setting: Setting, pool: Pool) -> Shared:
    nodes = list(pool.nodes)
    if len(nodes) < 2:
        return Shared()
    files = {node.name: f"{PREFIX}{setting.token}-{number}/here" for number, node in enumerate(nodes)}
    texts = {name: f"{file}\n" * LINES for name, file in files.items()}

    def own(name: str, *, remove: bool) -> Call:
        about = {"storage": str(setting.storage), "name": files[name], "text": texts[name], "remove": remove}
        return ask(__name__, LIMIT_S, **about)

    try:
        shared = Shared(files=files, written=pool.ask({name: own(name, remove=False) for name in files}, Written))
        digests = {name: hashlib.sha256(texts[name].encode()).hexdigest() for name in files if shared.mount(name) is not None}
        wait_s = WAIT_S[setting.level]

        def look(name: str) -> Call:
            wanted = {shared.path(name, other): digest for other, digest in digests.items()}
            return ask("seen", LIMIT_S + wait_s, digests=wanted, wait_s=wait_s)

        return structs.replace(shared, looked=pool.ask({name: look(name) for name in digests}, SeenFiles))
    finally:
        pool.ask({node.name: own(node.name, remove=True) for node in pool.nodes if node.name in files}, Written)


def probe(*, storage: str, name: str, text: str, remove: bool) -> Written:
    """`name`: of the file and its folder, below the storage or the nearest existing folder."""
    import shutil
    from pathlib import Path

    from chaosrun.checkpoint.storage_errors import storage_errors
    from chaosrun.errors import ResourcesError
    from chaosrun.preflight.probes.storage_place import mount_of, nearest_folder
    from chaosrun.records.filesystem import Filesystem

    try:
        with storage_errors(Path(storage)):
            mount = mount_of(nearest_folder(Path(storage)))
            path = Path(mount.base) / name
            if remove:
                shutil.rmtree(path.parent)
            else:
                path.parent.mkdir()
                Filesystem().write_durably(path, text.encode())
            return Written(mount=mount)
    except ResourcesError as error:
        return Written(failed=StorageFailure.of(error))


def judge(setting: Setting, nodes: Sequence[Node], shared: Shared) -> list[Finding]:
    same = ROWS.of(device=str(setting.storage))
    if not shared.files:
        return [same.skip("one node: it takes two nodes to share a storage")]
    found: list[Finding] = []
    for name, silence in {**shared.written.unanswered, **shared.looked.unanswered}.items():
        found.append(no_answer(same.of(node=name), silence) or same.error(silence.error, _AGAIN, node=name))
    for name, written in shared.written.answered.items():
        if written.failed is not None:
            found.append(same.fail(written.failed.error, "no error", written.failed.remedy, node=name))
    sees = {
        name: {other for other in shared.looked.answered if shared.path(name, other) in seen.after_s}
        for name, seen in shared.looked.answered.items()
    }
    groups = _groups(sees, next((node.name for node in nodes if node.head), None))
    several = setting.job is not None and nodes_used(setting, nodes) > 1
    for group in groups:
        rivals = [rival for rival in groups if rival is not group and len(rival) >= len(group)]
        for name in group:
            row = same.of(node=name)
            if rivals:
                found.append(_outside_largest_group(row, shared, name, group, rivals, WAIT_S[setting.level], several))
            elif len(sees) == 1:
                found.append(row.skip("no other node came so far"))
            else:
                found += _among(row, setting, shared, name, [other for other in group if other not in sees[name]], len(group))
    return found


def _groups(sees: dict[str, set[str]], head: str | None) -> list[list[str]]:
    """Sets of nodes that saw each other, even if only one way: the largest first, of equal ones the one with Ray's head."""
    groups: list[set[str]] = []
    for name, others in sees.items():
        linked = {name, *others}
        touching = [group for group in groups if group & linked]
        groups = [group for group in groups if not group & linked]
        groups.append(linked.union(*touching))
    groups.sort(key=lambda group: (len(group), head in group), reverse=True)
    return [[name for name in sees if name in group] for group in groups]


def _among(row: Rows, setting: Setting, shared: Shared, name: str, missed: Sequence[str], together: int) -> Iterator[Finding]:
    """The finding on a node that shares the storage with most."""
    seen = shared.looked.answered[name]
    writers = {shared.path(name, other): other for other in shared.looked.answered}
    for path, what in seen.torn.items():
        here = row.of(name="whole files", device=writers[path])
        remedy = "put checkpoints on storage that shows a renamed file only when its bytes are there"
        yield here.fail(f"seen in part: {what}", "a file is whole when it is seen", remedy)
    latest_s = max((after_s for path, after_s in seen.after_s.items() if path not in seen.torn), default=0.0)
    if missed:
        waited = duration(WAIT_S[setting.level])
        yield row.warn(f"{listed(missed)} not seen within {waited}, though others see each other", _EVERYONE, _LATE)
    else:
        status = Status.PASS if latest_s <= LATEST_SEEN_S else Status.WARN
        measured = f"sees {count(together - 1, 'other node')}, the last after {duration(latest_s)}"
        yield row.judged(status, measured, f"at most {duration(LATEST_SEEN_S)} after all have written", _LATE)


def _outside_largest_group(
    row: Rows, shared: Shared, name: str, group: Sequence[str], rivals: Sequence[Sequence[str]], waited_s: float, several: bool
) -> Finding:
    """The finding on a node outside the largest group."""
    missed = [other for rival in rivals for other in rival]
    mount = shared.mount(name)
    where = f"{mount.base} ({mount.type} of {mount.source or '?'})" if mount else row.device
    measured = f"not shared: {listed(missed)} not seen within {duration(waited_s)}, at {where}"
    if len(group) > 1:
        measured += f"; shared with {listed([other for other in group if other != name])}"
    if waited_s < PATIENT_S and any(_may_come_late(mount, shared.mount(other)) for other in missed):
        why = f"the same is mounted there, and a client may keep what it knows of a directory for {duration(PATIENT_S)}"
        return row.warn(measured, _EVERYONE, "ask again with --level deep, which looks for longer", reason=why)
    why = "a job that resumes on another node finds none of its checkpoints there"
    if several:
        why = "the job needs several nodes, and a rank finds no checkpoint that was saved on another"
    status = Status.FAIL if several or len(rivals[0]) > 1 else Status.WARN
    remedy = "mount one storage on every node, and name it with checkpoint.storage"
    return row.row(status, measured, _EVERYONE, reason=why, remedy=remedy)


def _may_come_late(first: Mount | None, second: Mount | None) -> bool:
    """Whether both have mounted the same storage from a server. Files on local storage are seen at once, or never."""
    if first is None or second is None:
        return False
    same = (first.base, first.type, first.source) == (second.base, second.type, second.source)
    return same and not first.source.startswith("/dev/") and first.type not in OF_ONE_NODE


CHECK = Check(
    name="shared storage", about="what one node saves, the others see: whole, and soon", order=80, gather=gather, judge=judge
)
