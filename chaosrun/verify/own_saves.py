"""The checkpoints that a script itself completed: which files, and after which step. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from chaosrun.records.codec import changed
from chaosrun.records.grouping import grouped
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.traces import ALIVE, RankTrace, SaveRecord
from chaosrun.wording import rank_list

if TYPE_CHECKING:
    from chaosrun.verify.check import Drill

WRITERS = frozenset({"torch.save", "safetensors", "dcp", "file"})
"""Writers of tensors (`SaveRecord.how`): files written by anything else do not count as checkpoints."""

OF_ONE_CALL = frozenset({"torch.save", "safetensors"})
"""Those of which the beginning and the end of each file are recorded."""

REMOVED = "remove"

Renames = Mapping[str, Sequence[tuple[int, SaveRecord]]]
"""Renames of files and folders with their place in time, by the name before."""

_DIGEST = 16
"""Number of hex digits in the digest of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that a script completed: it continued to train after it."""

    attempt: int
    step: int
    path: str
    kinds: frozenset[str]
    """Paths, without digits, of its files on all ranks."""
    needed: frozenset[str]
    """Files that hold tensors, as written and as renamed: a link to them may be made only once."""
    written: tuple[SaveRecord, ...]
    renames: tuple[SaveRecord, ...]
    behind_s: float | None
    """When its last file was written, if it was written in the background."""

    @property
    def enough(self) -> tuple[frozenset[str], ...]:
        """Subsets of `needed` that each have all the contents, without files whose contents other files hold: a copy of the
        best weights may exist in addition to a checkpoint. Several, if the result depends on the order."""
        held: dict[str, set[tuple[str, str]]] = {}
        names: dict[str, set[str]] = {}
        by_name = renames_in(self.renames)
        for saved in self.written:
            entries = {_entry(name, value) for name, value in saved.held.items() if ALIVE not in name}
            held.setdefault(kind := without_digits(saved.path), set()).update(entries)
            names.setdefault(kind, {kind}).add(without_digits(named_since(saved, by_name)))
        found: dict[frozenset[str], None] = {}
        for first in held:
            left = dict(held)
            for kind in (first, *held):
                if kind in left and _is_held_by(left[kind], [each for other, each in left.items() if other != kind]):
                    del left[kind]
            dropped = {name for kind in held.keys() - left.keys() for name in names[kind]}
            found[self.needed - (dropped - {name for kind in left for name in names[kind]})] = None
        return tuple(found) or (self.needed,)

    @property
    def entries(self) -> frozenset[str]:
        """Names of their entries, as far as they were seen."""
        return frozenset(name for saved in self.written for name in saved.held if ALIVE not in name)


def saved_by_several(drill: "Drill") -> Iterator[str]:
    """Ranks that write one file after the same step: a restart finds what one of them wrote, or parts of each."""
    writers: dict[tuple[int, str], set[int]] = {}
    for trace in drill.reference.attempts[0].traces.values() if drill.by_script and drill.reference.attempts else ():
        for save in trace.saves:
            if save.how in OF_ONE_CALL:
                writers.setdefault((save.step, save.path), set()).add(trace.rank)
    found = next(((path, ranks) for (_, path), ranks in writers.items() if len(ranks) > 1), None)
    if found:
        yield (
            f"{rank_list(sorted(found[1]))} each save {found[0]}: the file of one of them stays, or parts of each (save it on "
            "one rank, or a file for each rank)"
        )


def saves(leg: LegHistory) -> Iterator[Saved]:
    """The checkpoints that the attempts of this leg completed, oldest first."""
    for attempt, step, own in _written(leg):
        if _is_complete(own) and _went_on(attempt, own):
            every = [saved for _, saved in own]
            written = [saved for saved in every if saved.how in WRITERS]
            renames = [saved for saved in every if saved.how == "rename"]
            by_name = renames_in(renames)
            finals = [PurePath(named_since(saved, by_name)) for saved in written]
            bringing = [each for each in renames if any(final.is_relative_to(each.path) for final in finals)]
            # If the folder was renamed as a whole, the folder is the checkpoint.
            path = next((rename.path for rename in renames if finals[0].is_relative_to(rename.path)), str(finals[0]))
            kinds, needed = _kinds(every), _kinds([*written, *bringing])
            behind_s = max((saved.time_s for saved in every if saved.aside), default=None)
            about = {"path": path, "kinds": kinds, "needed": needed, "written": tuple(written), "renames": tuple(renames)}
            yield Saved(attempt=attempt.number, step=step, behind_s=behind_s, **about)


def _entry(name: str, value: str) -> tuple[str, str]:
    """The identity of an entry across files: a tensor by its digest alone, a plain value by its name."""
    return ("", value) if len(value) == _DIGEST and not set(value) - set("0123456789abcdef") else (name.split("/")[-1], value)


def _is_held_by(own: set[tuple[str, str]], others: list[set[tuple[str, str]]]) -> bool:
    """Whether another file holds all its entries, or all its tensors and more."""
    tensors, *more = ({entry for entry in each if not entry[0]} for each in (own, *others))
    return bool(tensors) and (any(own <= other for other in others) or any(tensors < other for other in more))


def _kinds(saved: Iterable[SaveRecord]) -> frozenset[str]:
    return frozenset(without_digits(record.path) for record in saved)


def _written(leg: LegHistory) -> Iterator[tuple[Attempt, int, list[tuple[int, SaveRecord]]]]:
    """By attempt and step, the files that each rank wrote and renamed. Another thread writes files later than their step: if
    each checkpoint has a folder, they belong to the training's own newest save into it."""
    folders = _numbered_folders(leg)
    for attempt in leg.attempts:
        every = [(rank, saved) for rank, trace in attempt.traces.items() for saved in trace.saves]
        begun: dict[str, set[int]] = {}
        for _, saved in every:
            if saved.how in WRITERS and not saved.aside and (folder := _folder(saved)) in folders:
                begun.setdefault(folder, set()).add(saved.step)
        by_step: dict[int, list[tuple[int, SaveRecord]]] = {}
        for rank, saved in every:
            steps = begun.get(saved.before, set()) | begun.get(_folder(saved), set()) if saved.aside else set()
            step = max((step for step in steps if step <= saved.step), default=saved.step)
            own = by_step.setdefault(step, [])
            if saved.how != REMOVED:
                own.append((rank, saved if step == saved.step else changed(saved, step=step)))
        yield from ((attempt, step, own) for step, own in sorted(by_step.items()))


def _folder(saved: SaveRecord) -> str:
    return str(PurePath(saved.path).parent)


def _numbered_folders(leg: LegHistory) -> set[str]:
    """Folders into which files were saved and that have siblings with similar names: one for each checkpoint."""
    saved = {_folder(each) for attempt in leg.attempts for trace in attempt.traces.values() for each in trace.saves}
    alike = Counter(map(without_digits, saved))
    return {folder for folder in saved if alike[without_digits(folder)] > 1}


def without_digits(path: str) -> str:
    return "".join(each for each in path if not each.isdigit())


def cut_short(leg: LegHistory) -> bool:
    """Whether an attempt was seen to end inside a save by the script."""
    written = (own for *_, own in _written(leg))
    return any(not _is_complete(own) for own in written if any(saved.how in WRITERS for _, saved in own))


def renames_in(saves: Iterable[SaveRecord]) -> Renames:
    return grouped(enumerate(each for each in saves if each.how == "rename" and each.before), lambda each: each[1].before)


def named_since(save: SaveRecord, renames: Renames) -> str:
    """The file's path after the script has renamed it, or its folder, by the renames of its own attempt. Another thread may
    have done so after later steps, but not before the save."""
    path, last = PurePath(save.path), -1
    while following := [
        found
        for name in (path, *path.parents)
        if (found := next((each for each in renames.get(str(name), ()) if each[0] > last and _may_follow(save, each[1])), None))
    ]:
        last, rename = min(following, key=lambda each: each[0])
        path = rename.path / path.relative_to(rename.before)
    return str(path)


def _may_follow(save: SaveRecord, rename: SaveRecord) -> bool:
    return rename.time_s >= save.time_s and rename.step >= save.step if save.aside else rename.step == save.step


def _is_complete(own: list[tuple[int, SaveRecord]]) -> bool:
    """Whether every call that writes tensors has returned; DCP renames its metadata last."""
    calls = [(rank, saved) for rank, saved in own if saved.how in WRITERS]
    begun, done = (Counter((r, s.path) for r, s in calls if s.done is is_done and s.how != "dcp") for is_done in (False, True))
    renamed = any(saved.how == "rename" and saved.done for _, saved in own)
    return bool(calls) and not begun - done and (renamed or all(saved.how != "dcp" for _, saved in calls))


def _went_on(attempt: Attempt, own: list[tuple[int, SaveRecord]]) -> bool:
    """Whether each rank that saved continued: anything that follows the last file, such as a rename, was then done."""
    return all(_is_past(attempt.traces[rank], max(saved.time_s for by, saved in own if by == rank)) for rank, _ in own)


def _is_past(trace: RankTrace, time_s: float) -> bool:
    """Whether the script reached the end of a step, or of its training, after this moment."""
    newest = trace.steps.last
    done = bool(newest and trace.steps[newest].time_s > time_s)
    return bool(trace.end) or done or any(each.time_s >= time_s for each in trace.saved)
