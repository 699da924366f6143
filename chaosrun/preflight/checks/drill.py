"""The check "drill": a small real drill on each node, and one over all nodes that came back."""

import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaosrun.cluster.probing import Call
from chaosrun.preflight.assess.drill import assess_drill
from chaosrun.preflight.drills.wanted import Terms, Wanted, wanted_on, wanted_over
from chaosrun.preflight.model import PROBES, Check, Facts, Level, Pool, Setting

BEGIN_WITHIN_S = 40.0
"""No drill of a single node begins later, unless the preflight is deep."""
LIMIT_S = 120.0
"""Of one drill."""
SEEN_WITHIN_S = 5.0
DEEP_SHARE = 0.3
"""Of the time that a deep preflight may take, drills of single nodes are repeated for this share."""


def gather(setting: Setting, pool: Pool) -> Facts:
    """{"nodes": {name: facts | None}, "all": facts | None, "unplaced": {name: why}, "unseen": {name: why}, "unwritable": why,
    "strict": whether the drill's job forbids what is not deterministic}; of each drill also "workers", "gpu" (of each worker)
    and "on" (names of its nodes), of the one over all also "left_out"."""
    with _no_empty_folders(setting.root):
        return _drilled(setting, pool)


def _drilled(setting: Setting, pool: Pool) -> Facts:
    strict = setting.job is None or setting.job.spec.deterministic == "strict"
    facts = {"nodes": {}, "all": None, "unplaced": {}, "unseen": {}, "unwritable": None, "strict": strict}
    if setting.drills is None:
        return {**facts, "unplaced": {node.name: "there is no Ray to place it on" for node in pool.nodes}}
    try:
        with _marked(setting.root) as (path, text):
            unseen = _unseen(pool, path, text)
    except OSError as error:
        return {**facts, "unwritable": f"{error.filename or setting.root}: {error.strerror}"}
    nodes = list(pool.nodes)
    wishes = {node.name: wanted_on(setting, node, nodes) for node in nodes if node.name not in unseen}
    wanted = {name: wish for name, wish in wishes.items() if isinstance(wish, Wanted)}
    unplaced = {name: wish for name, wish in wishes.items() if isinstance(wish, str)}
    # Should time run out, it is not always for the same ones.
    order = random.sample(sorted(wanted), len(wanted))
    alone = dict(zip(order, setting.drills.run([wanted[name] for name in order], _terms(setting)), strict=True))
    told = {name: _with_place(alone[name], wish) for name, wish in wanted.items()}
    whole = None
    sound = [name for name, each in told.items() if each is None or each.get("status") == "PASS"]
    if len(sound) > 1:
        terms = Terms(root=setting.root, begin_within_s=None, limit_s=LIMIT_S)
        over = wanted_over([wanted[name] for name in sound], setting.job)
        whole = _with_place(setting.drills.run([over], terms)[0], over)
        if whole is not None:
            whole = {**whole, "left_out": [name for name in sound if name not in whole["on"]]}
    return {**facts, "nodes": told, "all": whole, "unplaced": unplaced, "unseen": unseen}


def _with_place(told: Facts | None, wish: Wanted) -> Facts | None:
    place = {"workers": wish.workers, "gpu": wish.gpu, "on": [node.name for node in wish.nodes]}
    return None if told is None else {**told, **place}


def _terms(setting: Setting) -> Terms:
    deep = setting.level is Level.DEEP
    return Terms(
        root=setting.root,
        begin_within_s=None if deep else BEGIN_WITHIN_S,
        limit_s=LIMIT_S,
        repeat_s=DEEP_SHARE * setting.seconds if deep and setting.seconds else 0.0,
    )


@contextmanager
def _no_empty_folders(root: Path) -> Iterator[None]:
    """Whatever was not there before is not left there empty."""
    absent = [path for path in (root / "runs", root) if not path.exists()]
    try:
        yield
    finally:
        for path in absent:
            with suppress(OSError):  # kept runs
                path.rmdir()


@contextmanager
def _marked(root: Path) -> Iterator[tuple[Path, str]]:
    """A file under the root that nobody else can have written, and what it holds."""
    root.mkdir(parents=True, exist_ok=True)
    text = uuid.uuid4().hex
    path = root / f".preflight-{text}"
    path.write_text(text)
    try:
        yield path, text
    finally:
        path.unlink()


def _unseen(pool: Pool, path: Path, text: str) -> dict[str, str]:
    """Nodes that do not see what this process writes under the root, and why."""
    call = Call(
        probe=f"{PROBES}.seen_file",
        parameters={"path": str(path), "text": text, "wait_s": SEEN_WITHIN_S},
        limit_s=4 * SEEN_WITHIN_S,
    )
    told = pool.ask({node.name: call for node in pool.nodes}, dict)
    return {
        **{name: silence.error for name, silence in told.unanswered.items()},
        **{name: facts["why"] for name, facts in told.answered.items() if not facts["seen"]},
    }


CHECK = Check(
    name="drill",
    about="a small training is killed, and comes back exactly, on each node and over all",
    order=90,
    level=Level.STANDARD,
    judge=assess_drill,
    gather=gather,
)
