"""Probes whether a training loader's samples depend on the global random streams, which a restart does not restore for it.

With loader workers those streams are never saved, without them the loader has drawn ahead of the step that is saved (hazards
R5, R6). A few samples are fetched twice under one state of the streams, and again under others. Forked children of the rank do
this and leave it untouched: they have their own copy of the dataset, their own positions in open files, none of its sockets and
pipes, and a deadline. A sample that cannot be fetched there (CUDA in use, a live connection, a lock) is "unknown".
"""

import fcntl
import json
import os
import random
import select
import signal
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset, _DatasetKind

from chaosrun.observe.contents import content_digest
from chaosrun.observe.rng import digest_rng
from chaosrun.records.filesystem import write_all
from chaosrun.records.traces import ProbeRecord

SAMPLES = 3
BUDGET_S = 5.0
ENOUGH_S = 1.0
"""Time for fetching in one child: slow samples are fetched under fewer states."""
STATE, OTHER_STATES = 1, (2, 3, 5, 8, 13, 21, 34, 55)
"""Seeds. One other state is enough, unless samples draw: a draw may decide the same twice (a coin)."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """The result of fetching one sample once."""

    name: str
    raw: str
    """Digest before `collate_fn`."""
    collated: str
    drew: list[str]
    """Global streams from which the dataset drew."""
    collate_drew: list[str]

    @property
    def all_drew(self) -> list[str]:
        return [stream for stream in ("python", "numpy", "torch") if stream in (*self.drew, *self.collate_drew)]


class _Unanswered(Exception):
    """A child gave no answer, or only the reason for failing."""


def probe(loader: Any) -> ProbeRecord:
    """Fetch the first samples of a DataLoader, or of accelerate's wrapper, for at most BUDGET_S. Changes nothing here."""
    loader = getattr(loader, "base_dataloader", loader)
    deadline = time.monotonic() + BUDGET_S
    try:
        first, again = _twice(loader, deadline)
        if not first:
            return ProbeRecord(items="unknown", detail="the dataset has no samples")
        for one, other in zip(first, again, strict=False):
            if one.collated != other.collated:
                return ProbeRecord(items="never_repeats", detail=f"{_place(one, other)} differs from one fetch to the next")
        drawing = [sample for sample in first if sample.all_drew]
        for others in _ask(lambda: _under(loader, OTHER_STATES if drawing else OTHER_STATES[:1]), deadline):
            for one, other in zip(first, others, strict=False):
                if one.collated != other.collated:
                    streams = " and ".join(one.all_drew) or "state"
                    return ProbeRecord(items="global_rng", detail=f"{_place(one, other)} depends on the global RNG ({streams})")
    except _Unanswered as unanswered:
        return ProbeRecord(items="unknown", detail=str(unanswered))
    if drawing:
        streams = " and ".join(drawing[0].all_drew)
        return ProbeRecord(
            items="draws", detail=f"{drawing[0].name} moves the global RNG ({streams}) and does not depend on it"
        )
    return ProbeRecord(items="independent", detail=f"{len(first)} samples fetched under several states of the global RNG")


def _twice(loader: Any, deadline: float) -> tuple[list[_Fetched], list[_Fetched]]:
    """The samples fetched twice under one state. One process fetches both from a dataset, so that a generator kept in it shows;
    a stream is fetched again by a second process, as many streams can be read only once."""
    if isinstance(loader.dataset, IterableDataset):
        (first,) = _ask(lambda: _under(loader, (STATE,)), deadline)
        (again,) = _ask(lambda: _under(loader, (STATE,)), deadline)
    else:
        first, again = _ask(lambda: _under(loader, (STATE, STATE)), deadline)
    return first, again


def _place(one: _Fetched, other: _Fetched) -> str:
    return f"what collate_fn makes of {one.name}" if one.raw == other.raw and not one.drew else one.name


# In the child


def _under(loader: Any, states: tuple[int, ...]) -> Iterator[list[_Fetched]]:
    """The first samples, fetched as a loader worker fetches them, under each state of the global streams."""
    began = time.monotonic()
    source = loader.batch_sampler if loader._auto_collation else loader.sampler
    # Once for all fetches: a sampler may yield other indices the next time.
    keys = list(islice(([key] for batch in source for key in batch) if loader._auto_collation else iter(source), SAMPLES))
    for turn, state in enumerate(states):
        if turn >= 2 and time.monotonic() - began > ENOUGH_S:
            return
        _seed(state)
        fetcher = _DatasetKind.create_fetcher(
            loader._dataset_kind, loader.dataset, loader._auto_collation, lambda samples: samples, loader.drop_last
        )
        fetched: list[_Fetched] = []
        for number, key in enumerate(keys):
            if loader._dataset_kind == _DatasetKind.Map:
                _seed(state)
                named = key[0] if loader._auto_collation else key
                name = f"item {named!r:.40}"
            else:
                name = f"item {number} of the stream"
            try:
                fetched.append(_fetch(fetcher, key, loader.collate_fn, name))
            except StopIteration:
                break
            if time.monotonic() - began > ENOUGH_S:
                break
        yield fetched


def _fetch(fetcher: Any, key: Any, collate: Callable[[Any], Any], name: str) -> _Fetched:
    before = digest_rng(_CPU)
    raw = fetcher.fetch(key)
    between = digest_rng(_CPU)
    raw_digest = content_digest(raw)
    collated = collate(raw)
    after = digest_rng(_CPU)
    return _Fetched(
        name=name,
        raw=raw_digest,
        collated=content_digest(collated),
        drew=[stream for stream in before if before[stream] != between[stream]],
        collate_drew=[stream for stream in before if between[stream] != after[stream]],
    )


def _seed(state: int) -> None:
    random.seed(state)
    numpy.random.seed(state)
    torch.default_generator.manual_seed(state)


# The child


def _ask(question: Callable[[], Iterator[list[_Fetched]]], deadline: float) -> list[list[_Fetched]]:
    """The answer of a child forked for this call. Raises _Unanswered. Never leaves a process behind."""
    answer, report = os.pipe2(os.O_CLOEXEC)
    with warnings.catch_warnings():
        # Newer Python warns that a fork in a process with threads may deadlock: hence the deadline.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _answer(question, report)
    child = os.pidfd_open(pid)
    os.close(report)
    try:
        said = _read(answer, deadline)
    finally:
        os.close(answer)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        with suppress(ChildProcessError):  # the script ignores SIGCHLD, so the kernel reaped the child
            os.waitpid(pid, 0)
        os.close(child)
    if said is None:
        raise _Unanswered(f"its samples took longer than the {BUDGET_S:g} s of the probe")
    if not said:
        raise _Unanswered("the probe died while it fetched a sample")
    result = json.loads(said)
    if "error" in result:
        raise _Unanswered(result["error"])
    return [[_Fetched(**sample) for sample in samples] for samples in result["fetched"]]


def _read(pipe: int, deadline: float) -> bytes | None:
    """Everything up to the end of the pipe; None when the deadline passes first."""
    said = b""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return said
        said += piece
    return None


def _answer(question: Callable[[], Iterator[list[_Fetched]]], report: int) -> None:
    """The child's whole life. Nothing inherited from the parent is flushed, closed or run at its end."""
    code = 1
    try:
        _let_go_of_files(report)
        # As in a loader worker: a thread pool does not survive a fork.
        torch.set_num_threads(1)
        fetched = [[asdict(sample) for sample in samples] for samples in question()]
        write_all(report, json.dumps({"fetched": fetched}).encode())
        code = 0
    except BaseException as error:  # any error of the dataset is the answer
        what = f"in the probe's process a sample could not be fetched: {type(error).__name__}: {error!s:.300}"
        write_all(report, json.dumps({"error": what}).encode())
    finally:
        os._exit(code)


def _let_go_of_files(report: int) -> None:
    """Share no open file with the parent, as reads would move its positions and take data from its connections. Files are
    reopened at the same position; all other descriptors are redirected to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue  # the descriptor of the listing itself
        if descriptor in (nothing, report) or stat.S_ISCHR(mode):
            continue
        own = nothing
        if stat.S_ISREG(mode) and descriptor > 2 and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            with suppress(OSError):
                own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
                os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
        if own != nothing:
            os.close(own)
