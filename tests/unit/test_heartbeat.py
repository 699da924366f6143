"""The heartbeat file: what was beaten can be read at any moment, whatever moment the writer was stopped at."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chaosrun.records.heartbeat import STAGES, Heart, Heartbeat, read_heartbeat


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_newest_beat_is_read_with_its_age_and_the_gaps_before_it(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "deep" / "rank-0.heartbeat"
    heart = Heart(clock)
    heart.open(path)
    assert read_heartbeat(path, clock) is None, "nothing was beaten yet"
    for stage, step, took_s in [("forward", 1, 4.0), ("backward", 1, 1.0), ("forward", 2, 0.5), ("backward", 2, 2.0)]:
        heart.beat(stage, step)
        clock.now_s += took_s
    beat = read_heartbeat(path, clock)
    assert beat is not None
    assert (beat.count, beat.step, beat.stage, beat.silent_s) == (4, 2, "backward", 2.0)
    assert beat.words == "in the gradient all-reduce of step 2"
    assert beat.first == {"forward": 4.0, "backward": 1.0}
    assert beat.longest == {"forward": 0.5}


def test_who_is_further_behind_follows_from_step_and_stage() -> None:
    def place(stage: str, step: int) -> tuple[int, int]:
        return Heartbeat(count=1, step=step, stage=stage, silent_s=0.0, first={}, longest={}).place

    passed = [place("restored", 2), place("epoch", 3)]
    passed += [place(stage, 3) for stage in ("fetch", "forward", "backward", "optimizer", "record", "own", "after")]
    passed += [place(stage, 3) for stage in STAGES if stage.startswith("checkpoint.")]
    passed += [place("over", 3), place("fetch", 4), place("ended", 4), place("leaving", 4)]
    assert passed == sorted(passed)


def test_a_missing_a_foreign_and_a_cut_file_show_no_beat(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    assert read_heartbeat(path) is None
    heart = Heart()
    heart.open(path)
    heart.beat("forward", 1)
    whole = path.read_bytes()
    assert read_heartbeat(path) is not None
    for damaged in (b"", whole[:40], b"\xff" * len(whole), b"\0" * len(whole)):
        path.with_suffix(".damaged").write_bytes(damaged)
        assert read_heartbeat(path.with_suffix(".damaged")) is None


def test_a_writer_stopped_anywhere_in_a_beat_still_shows_its_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    heart = Heart()
    heart.open(path)
    states = [path.read_bytes()]
    memory, durations = heart._integers, heart._durations

    class Watched:
        """Keeps the file as it is after every single store."""

        def __init__(self, words: Any) -> None:
            self._words = words

        def __setitem__(self, place: int, value: float) -> None:
            self._words[place] = value
            states.append(path.read_bytes())

        def __getitem__(self, place: int) -> float:
            return self._words[place]

    heart._integers, heart._durations = Watched(memory), Watched(durations)  # type: ignore[assignment]
    steps = []
    for step in range(1, 5):
        heart.beat("forward", step)
        while len(steps) < len(states):
            steps.append(step)
    for step, state in zip(steps, states, strict=True):
        copy = tmp_path / "copy"
        copy.write_bytes(state)
        seen = read_heartbeat(copy)
        if step == 1 and seen is None:
            continue
        assert seen is not None and seen.step in (step - 1, step), f"step {step}: {seen}"
    assert len(states) > 20


WRITER = """\
import sys
from pathlib import Path
from chaosrun.records.heartbeat import Heart
heart = Heart()
heart.open(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    heart.beat("forward" if step % 2 else "backward", step)
"""


def test_what_a_busy_writer_shows_is_never_torn(tmp_path: Path) -> None:
    """The stage follows from the step: a reader that saw half of each would see the two disagree."""
    path = tmp_path / "heartbeat"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    chance = random.Random(5)
    try:
        while read_heartbeat(path) is None:
            assert writer.poll() is None
            time.sleep(0.01)
        last = seen = 0
        while seen < 2000 or last <= 2000:
            if seen % 200 == 0:
                # Wherever that is, there is a beat to be read.
                os.kill(writer.pid, signal.SIGSTOP)
                time.sleep(chance.random() / 100)
                assert read_heartbeat(path) is not None
                os.kill(writer.pid, signal.SIGCONT)
            beat = read_heartbeat(path)
            assert beat is not None
            assert beat.step == beat.count
            assert beat.stage == ("forward" if beat.step % 2 else "backward")
            assert beat.step >= last
            last, seen = beat.step, seen + 1
    finally:
        writer.kill()
        writer.wait()


def test_a_file_that_cannot_be_had_is_an_error_and_the_heart_beats_on(tmp_path: Path) -> None:
    heart = Heart()
    (tmp_path / "heartbeat").mkdir()
    with pytest.raises(IsADirectoryError):
        heart.open(tmp_path / "heartbeat")
    heart.beat("forward", 1)
