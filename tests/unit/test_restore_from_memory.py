"""Restores from the copies that a node keeps in memory: exactly what was committed, or the files are read."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import ResourcesError
from chaosrun.protocol import background, checkpointing, snapshot
from chaosrun.protocol.snapshot import HEADER_BYTES, Arena
from chaosrun.records.position import Position
from tests.unit.test_background_save import EVERYWHERE, POSITION, Job

Memory = tuple[int, int]


@pytest.fixture
def memory() -> Iterator[Memory]:
    """The node's, of one rank; the first copy lies in the first."""
    descriptors = os.memfd_create("node"), os.memfd_create("node")
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def job(folder: Path, memory: Memory, mode: str = "async", **about: Any) -> Job:
    """A rank of the next attempt."""
    return Job(folder, mode, memory=(*memory, *memory), **about)


def saved(folder: Path, memory: Memory, **about: Any) -> tuple[Job, str]:
    """A rank that has saved a checkpoint, and gone on."""
    first = job(folder, memory, **about).learn(3)
    name = first.checkpointer.save(POSITION, {})
    first.checkpointer.wait()
    return first, name


def restored(rank: Job, name: str) -> Job:
    rank.checkpointer.restore(name, {})
    return rank


@EVERYWHERE
def test_all_of_it_comes_back_without_a_file_being_read(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    first, name = saved(tmp_path, memory, device=device, width=256)
    at = first.state.digests()
    first.learn(2)
    again = job(tmp_path, memory, device=device, width=256)
    monkeypatch.setattr(again.state, "load", lambda *args: pytest.fail("a file is read"))
    assert again.checkpointer.restore(name, {}) == POSITION
    assert again.checkpointer.source == "memory"
    assert again.state.digests() == at
    assert again.average.mean.device.type == device
    # And trains in memory of its own: the copy stays what it is for the next attempt.
    again.learn(3)
    third = restored(job(tmp_path, memory, device=device, width=256), name)
    assert (third.checkpointer.source, third.state.digests()) == ("memory", at)
    later = third.learn(2).state.digests()
    by_files = restored(Job(tmp_path, "sync", device=device, width=256), name)
    assert by_files.learn(2).state.digests() == later != at


def test_the_files_are_read_where_it_is_not_allowed(tmp_path: Path, memory: Memory) -> None:
    first, name = saved(tmp_path, memory)
    again = job(tmp_path, memory)
    again.checkpointer._order = replace(again.checkpointer._order, from_memory=False)
    again.checkpointer.restore(name, {})
    assert (again.checkpointer.source, again.state.digests()) == ("storage", first.state.digests())


@pytest.mark.parametrize("spoil", ["never saved", "skeleton", "header", "unsealed", "another attempt", "shrunk"])
def test_a_copy_that_is_not_the_committed_one_is_not_used(tmp_path: Path, memory: Memory, spoil: str) -> None:
    first, name = saved(tmp_path, memory)
    at, arena = first.state.digests(), Arena(memory[0])
    sealed = arena.sealed()
    assert sealed is not None
    match spoil:
        case "never saved":
            memory = os.memfd_create("other"), memory[1]
        case "skeleton":
            arena.memory()[sealed.layout.skeleton + 20] ^= 1
        case "header":
            arena.memory()[3] ^= 1
        case "unsealed":
            arena.unseal()
        case "another attempt":
            arena.seal(sealed._replace(attempt=2))
        case "shrunk":
            os.ftruncate(memory[0], HEADER_BYTES // 2)
    again = restored(job(tmp_path, memory, "sync"), name)
    assert (again.checkpointer.source, again.state.digests()) == ("storage", at)


@pytest.mark.parametrize("room", ["two", "limit", "short"])
def test_the_copy_of_the_newest_checkpoint_lasts_until_the_next_is_committed(
    tmp_path: Path, memory: Memory, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room for two; else it makes room."""
    width, enough = 256, 5 << 18
    if room == "short":
        # Enough for a copy, and for what a first one leaves; not for a second that has to leave as much as it takes.
        monkeypatch.setattr(snapshot, "SPARE_BYTES", 0)
        monkeypatch.setattr(background, "SPARE_BYTES", 0)
        monkeypatch.setattr(snapshot, "free_memory", lambda: enough)
    first, name = saved(tmp_path, memory, width=width, **({"memory_limit": enough} if room == "limit" else {}))
    at = first.state.digests()
    assert enough / 2 < Arena(memory[0]).size < enough
    first.learn().checkpointer.save(Position(epoch=0, batches=4, step=4), {})
    assert first.checkpointer.pending
    again = restored(job(tmp_path, memory, width=width), name)
    assert again.state.digests() == at
    assert again.checkpointer.source == ("memory" if room == "two" else "storage")


def test_a_restarted_rank_writes_over_the_older_copy(tmp_path: Path, memory: Memory) -> None:
    name, at = "", {}
    for batches in range(4, 7):
        rank = job(tmp_path, memory, resume=name or None)
        if name:
            rank.checkpointer.restore(name, {})
            assert (rank.checkpointer.source, rank.state.digests()) == ("memory", at)
            # Before it is committed, it is killed.
            rank.learn().checkpointer.save(Position(epoch=0, batches=9, step=9), {})
            rank = restored(job(tmp_path, memory, resume=name), name)
            assert rank.checkpointer.source == "memory"
        name = rank.learn().checkpointer.save(Position(epoch=0, batches=batches, step=batches), {})
        at = rank.state.digests()
        rank.checkpointer.wait()


def test_the_copies_are_there_as_soon_as_their_checkpoint_is_committed(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointStore, "retain", lambda store: os._exit(1))
    first = job(tmp_path, memory).learn(3)
    at, name = first.state.digests(), first.checkpointer.save(POSITION, {})
    with pytest.raises(ResourcesError):
        first.checkpointer.wait()
    again = restored(job(tmp_path, memory, "sync"), name)
    assert (again.checkpointer.source, again.state.digests()) == ("memory", at)


def test_the_copy_of_a_checkpoint_that_was_not_committed_is_written_over(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, name = saved(tmp_path, memory)
    with monkeypatch.context() as killed:
        killed.setattr(CheckpointStore, "commit", lambda store, staging, step: os._exit(1))
        second = job(tmp_path, memory, resume=name)
        second.checkpointer.save(Position(epoch=0, batches=9, step=9), {})
        with pytest.raises(ResourcesError):
            second.checkpointer.wait()
    third = job(tmp_path, memory, resume=name)
    assert third.writer is not None
    copies = [arena.sealed() for arena in third.writer._arenas]
    assert [copy and copy.step for copy in copies] == [9, POSITION.step]


def test_a_flipped_bit_of_a_copy_is_seen(tmp_path: Path, memory: Memory, capfd: pytest.CaptureFixture[str]) -> None:
    first, name = saved(tmp_path, memory)
    Arena(memory[0]).memory()[HEADER_BYTES + 2] ^= 4
    again = restored(job(tmp_path, memory), name)
    assert (again.checkpointer.source, again.state.digests()) == ("storage", first.state.digests())
    assert "a copy of the checkpoint in memory is not what was saved" in capfd.readouterr().out


@pytest.mark.parametrize("answers", [[[False]], [[True], [False]]])
def test_where_one_rank_reads_its_files_all_do(tmp_path: Path, memory: Memory, answers: list[list[bool]]) -> None:
    """What the other rank says: that it has no copy; that its copy is not what was saved."""
    _, name = saved(tmp_path, memory)
    again, left = job(tmp_path, memory), list(answers)
    gather = again.checkpointer._peers.gather
    again.checkpointer._peers.gather = lambda value: [*gather(value), *left.pop(0)]  # type: ignore[method-assign]
    again.checkpointer.restore(name, {})
    assert again.checkpointer.source == "storage" and not left


def test_a_copy_larger_than_allowed_is_not_taken(tmp_path: Path, memory: Memory) -> None:
    first = job(tmp_path, memory, memory_limit=4 << 20, width=1024).learn(3)
    first.checkpointer.save(POSITION, {})
    assert not first.checkpointer.pending
    assert "checkpoint.memory allows 4 MiB" in first.checkpointer.because
    assert [Arena(each).sealed() for each in memory] == [None, None]


@pytest.mark.gpu
def test_where_memory_cannot_be_locked_the_training_waits_and_goes_on(tmp_path: Path, memory: Memory) -> None:
    first = job(tmp_path, memory, device="cuda").learn(3)
    assert first.writer is not None
    for arena in first.writer._arenas:
        arena.reserve(1 << 20)
        arena.pin()
        arena._pinned = None  # as if another library had locked it
    name = first.checkpointer.save(POSITION, {})
    assert "already mapped" in first.checkpointer.because
    at = first.state.digests()
    assert first.learn().state.digests() != at, "its GPU works on"
    again = restored(Job(tmp_path, "sync", device="cuda"), name)
    assert again.state.digests() == at


def test_the_rank_of_each_node_that_keeps_what_ranks_share() -> None:
    first = Job.told(Path("/"), "async")
    assert [
        checkpointing.keeps_shared(replace(first, rank=rank, local_rank=local, memory=memory))
        for rank, local, memory in ((0, 0, ()), (1, 1, (3, 4)), (2, 0, (3, 4)), (2, 0, ()))
    ] == [True, False, True, False]
