"""Files of traces: what is written comes back, what is cut off is left out, and what is damaged is never taken for sound."""

import json
import shutil
import threading
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from chaosrun import cli
from chaosrun.records import trace_reader
from chaosrun.records.codec import changed, encode
from chaosrun.records.layout import RunLayout
from chaosrun.records.position import Position
from chaosrun.records.trace_blocks import framed, frames, is_footer, is_step
from chaosrun.records.trace_reader import all_records, read_ends, read_moments, read_start, read_trace
from chaosrun.records.trace_writer import TraceWriter
from chaosrun.records.traces import (
    BLOCK_STEPS,
    BucketsRecord,
    CheckpointRecord,
    CommittedRecord,
    EndRecord,
    Line,
    RankTrace,
    SaveRecord,
    StartRecord,
    StepRecord,
)
from chaosrun.verify import verdict as module
from chaosrun.verify.verdict import judge
from tests.unit.legs import edit_ranks, edit_trace, only, put, write_run

DIGESTS = {"model": {"w": "0123456789abcdef", "b": "f" * 16}, "rng": {"torch": "none"}, "registered": {}}


def start(first: int, attempt: int = 1, tensors: int = 2) -> StartRecord:
    about: dict[str, Any] = {"rank": 0, "world_size": 1, "pid": 1, "time_s": 1000.0, "restored": None, "rng": "1" * 16}
    about |= {"param": "2" * 16, "params": bytes(4 * tensors), "position": Position(epoch=0, batches=first, step=first)}
    names = tuple(f"layers.{number}.weight" for number in range(tensors))
    return StartRecord(v=3, attempt=attempt, tensors=names, **about)


def step(number: int, **other: Any) -> StepRecord:
    digest = f"{number:016x}"
    about: dict[str, Any] = {"epoch": 0, "batches": number, "time_s": 1000.0 + number / 4, "ids": ((number, 70_000),)}
    about |= {"batch": (digest,), "rng": digest, "loss": ((0.1 * number).hex(),), "lr": ((0.5).hex(),)}
    about |= {"grad": digest, "grads": b"", "param": digest, "params": b""}
    return StepRecord(step=number, **{**about, **other})


def write(path: Path, *records: Line) -> Path:
    path.unlink(missing_ok=True)
    writer = TraceWriter(path)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def read(path: Path, attempt: int = 1) -> tuple[RankTrace, list[str]]:
    problems: list[str] = []
    return read_trace(path, attempt, 0, problems), problems


def checkpoint(number: int) -> CheckpointRecord:
    return CheckpointRecord(step=number, name=f"step-{number:08d}", time_s=1.0, duration_s=0.1, digests=DIGESTS)


def whole(steps: int) -> list[Line]:
    """Of a training, with a checkpoint every 50 steps."""
    done = [(step(number), *([checkpoint(number)] if number % 50 == 0 else [])) for number in range(1, steps + 1)]
    position = Position(epoch=0, batches=steps, step=steps)
    end = EndRecord(step=steps, position=position, time_s=1.0, digests=DIGESTS, checkpoint=None)
    buckets = BucketsRecord(step=0, layout=((0, 1),), primed=True)
    return [start(0), buckets, *(record for records in done for record in records), end]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("traces") / "rank-0.trace", *whole(150))


ODD: dict[str, dict[str, Any]] = {
    "unknown ids": {"ids": None},
    "ids of some micro-batches": {"ids": ((1, 2), None), "batch": ("0" * 16, "1" * 16)},
    "one of several optimizers": {"stepped": ("Adam 2 of 2",)},
    "ids of what inputs were made of": {"ids": None, "fetched": ((1, 2), None), "batch": ("0" * 16, "1" * 16)},
    "words for ids": {"ids": (("a", "b"),)},
    "negative and large ids": {"ids": ((-1, 2), (2**40, 0)), "batch": ("0" * 16, "1" * 16)},
    "no ids": {"ids": ((),)},
    "digests that are words": {"batch": ("none",), "rng": "r"},
    "digests in capitals": {"rng": "ABCDEFABCDEFABCD"},
    "a step without an optimizer": {"grad": "", "lr": ()},
    "losses that float32 does not hold": {"loss": ((0.1).hex(), (1e300).hex())},
    "losses that are no numbers": {"loss": ("nan", "inf", "-inf", "-0x0.0p+0")},
    "losses in float32": {"loss": ((0.5).hex(), (0.25).hex())},
    "a new epoch": {"epoch": 3, "batches": 1},
    "other rates": {"lr": ((0.1).hex(), (0.2).hex())},
    "items": {"items": 17},
    "a script's": {"state": "a" * 16, "settings": "b" * 16, "began": "c" * 16},
    "words of tensors": {"grads": b"12345678", "params": b"abcdefgh"},
    "a clock that went back": {"time_s": 3.5},
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("at", [1, 2, BLOCK_STEPS, BLOCK_STEPS + 1])
def test_what_is_written_comes_back(tmp_path: Path, what: str, at: int) -> None:
    steps = [step(number, **(ODD[what] if number == at else {})) for number in range(1, BLOCK_STEPS + 3)]
    path = write(tmp_path / "rank-0.trace", start(0), *steps)
    trace, problems = read(path)
    assert not problems
    assert [changed(record, attempt=0) for record in trace.steps.values()] == steps
    assert list(all_records(path, 0, 0)) == [start(0), *steps]


def test_other_records_come_back(path: Path) -> None:
    trace, problems = read(path)
    assert not problems
    assert [record.digests for record in trace.checkpoints] == [DIGESTS] * 3
    assert trace.end and trace.end.digests == DIGESTS and trace.buckets[0].layout == ((0, 1),)
    assert list(all_records(path, 1, 0))[-1] == whole(150)[-1]


def test_bytes_of_a_name_that_are_no_utf8_are_written_as_their_escapes(tmp_path: Path) -> None:
    """A script may call its files, its samples and its variables so; a record of them raises nothing in it."""
    save = SaveRecord(step=1, path="st\udce9te.pt", how="open", time_s=0.0, done=True, held={"\udce9": "\udce9"})
    path = write(tmp_path / "rank-0.trace", start(0), step(1, ids=(("\udce9",),)), save)
    trace, problems = read(path)
    assert not problems and trace.steps[1].ids == (("\\udce9",),)
    assert [(record.path, record.held) for record in trace.saves] == [("st\\udce9te.pt", {"\\udce9": "\\udce9"})]
    assert encode(save) == encode(changed(save, path="st\\udce9te.pt", held={"\\udce9": "\\udce9"}))


def test_a_state_that_was_digested_later_is_found_with_its_checkpoint(tmp_path: Path) -> None:
    saved, committed = changed(checkpoint(1), digests=None, pending=True), CommittedRecord(step=1, digests=DIGESTS)
    trace, problems = read(write(tmp_path / "rank-0.trace", start(0), step(1), saved, step(2), committed))
    assert not problems
    assert trace.states == trace.checkpoints == (changed(saved, digests=DIGESTS),)
    assert trace.committed == {1}
    trace, _ = read(write(tmp_path / "rank-0.trace", start(0), step(1), saved, step(2)))
    assert trace.checkpoints == (saved,)
    assert not trace.committed


def states(*digests: dict[str, dict[str, str]], name: str = "step-00000001") -> list[Line]:
    saved = [CheckpointRecord(step=1, name=name, time_s=1.0, duration_s=0.1, digests=each) for each in digests]
    return [start(0), step(1), *saved]


def test_a_file_says_once_what_a_state_names_and_holds(tmp_path: Path) -> None:
    """Wherever one of the two changes it is said anew; what can be compressed is, and digests cannot."""
    moments = {f"0/state/{number}/exp_avg": xxhash.xxh3_64_hexdigest(bytes([number])) for number in range(200)}
    settings = {"0/param_groups/0/lr": "float:0x1.8p+1"}
    others = {name: digest[::-1] for name, digest in moments.items()}
    kept = [{"optimizer": held, "rng": {"torch": "none"}} for held in (moments, moments, others, moments | settings, moments)]
    sizes: list[int] = []
    for count in range(len(kept) + 1):
        path = write(tmp_path / "rank-0.trace", *(records := states(*kept[:count])))
        sizes.append(path.stat().st_size)
        assert list(all_records(path, 0, 0)) == records
    named, again, other, _, _ = (after - before for before, after in pairwise(sizes))
    assert 1600 < named < 2600 and again < 150 and 1600 < other < 1850


def test_blocks_end_at_the_same_steps_wherever_an_attempt_began(tmp_path: Path, path: Path) -> None:
    expected, _ = read(path)
    records = [start(100, attempt=2), *map(step, range(101, 151))]
    later, problems = read(write(tmp_path / "rank-0.trace", *records), attempt=2)
    assert not problems
    # And with each checkpoint, where attempts begin.
    assert [(block.first, block.last) for block in expected.blocks] == [(1, 50), (51, 64), (65, 100), (101, 128), (129, 150)]
    assert [(block.first, block.last) for block in later.blocks] == [(101, 128), (129, 150)]
    sums = [[(block.digest, block.param) for block in trace.blocks[-2:]] for trace in (expected, later)]
    assert sums[0] == sums[1]


@pytest.mark.parametrize(
    ("other", "differs"),
    [({"time_s": 1.0, "items": 3}, False), ({"grads": bytes(8)}, True), ({"params": bytes(8)}, True)]
    + [({name: "e" * 16}, True) for name in ("rng", "grad", "param", "state", "settings", "began")]
    + [({"epoch": 1}, True), ({"batches": 7}, True), ({"ids": None}, True), ({"batch": ("e" * 16,)}, True)]
    + [({"loss": ((0.0).hex(),)}, True), ({"lr": ((0.0).hex(),)}, True)],
)
def test_a_blocks_digest_is_of_all_that_is_compared(tmp_path: Path, path: Path, other: dict[str, Any], differs: bool) -> None:
    records = whole(150)
    records = [changed(each, **other) if isinstance(each, StepRecord) and each.step == 70 else each for each in records]
    expected, (seen, problems) = read(path)[0], read(write(tmp_path / "rank-0.trace", *records))
    assert not problems
    same = [one.digest == another.digest for one, another in zip(expected.blocks, seen.blocks, strict=True)]
    assert same == [True, True, not differs, True, True]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A block, and what follows the last one."""
    began = changed(start(0), position=Position(epoch=0, batches=60, step=60))
    records = [began, *map(step, range(61, 65)), checkpoint(64), *map(step, range(65, 69))]
    return write(tmp_path_factory.mktemp("short") / "rank-0.trace", *records).read_bytes()


def test_a_file_that_is_cut_anywhere_is_read_up_to_there(short: bytes, tmp_path: Path) -> None:
    torn = tmp_path / "rank-0.trace"
    for size in range(len(short)):
        torn.write_bytes(short[:size])
        trace, problems = read(torn)
        steps = [record.step for record in trace.steps.values()]
        assert (problems, steps) == ([], list(range(61, 61 + len(steps)))), size


def flips(data: bytes) -> list[tuple[int, bytes]]:
    return [
        (at, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]) for at in range(len(data)) for mask in (1, 16, 128, 255)
    ]


def test_no_byte_changes_unseen(short: bytes, tmp_path: Path) -> None:
    """In a full block, in what follows the last one, and in its last record, which is not taken for one that was cut off."""
    damaged = tmp_path / "rank-0.trace"
    for at, other in flips(short):
        damaged.write_bytes(other)
        trace, problems = read(damaged)
        assert problems, f"byte {at} of {len(short)}"
        assert all(record == step(record.step, attempt=1) for record in trace.steps.values()), f"byte {at}"


def removed(data: bytes, chosen: Callable[[bytes], bool], number: int) -> bytes:
    """Without the n-th of the records that are chosen."""
    begins = [0, *(end for end, _ in frames(data))]
    places = [place for place, (_, content) in enumerate(frames(data)) if chosen(content)]
    return data[: begins[places[number]]] + data[begins[places[number] + 1] :]


@pytest.mark.parametrize("content", [b"no zlib", zlib.compress(b"\xff"), zlib.compress(msgspec.msgpack.encode(["no map"]))])
def test_what_is_no_compressed_record_is_damage(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "rank-0.trace", start(0), step(1))
    path.write_bytes(path.read_bytes() + framed(msgspec.msgpack.encode(content)))
    trace, problems = read(path)
    assert len(problems) == 1 and "record 3" in problems[0] and trace.start and list(trace.steps) == [1]


@pytest.mark.parametrize(("chosen", "number"), [(is_step, 3), (is_step, 100), (is_footer, 0)])
def test_a_record_that_was_taken_out_is_missed(
    path: Path, tmp_path: Path, chosen: Callable[[bytes], bool], number: int
) -> None:
    less = tmp_path / "rank-0.trace"
    less.write_bytes(removed(path.read_bytes(), chosen, number))
    assert read(less)[1]


def test_a_block_of_another_file_is_not_taken(path: Path, tmp_path: Path) -> None:
    """Its own digest is right; the running one is not that of what was written before."""
    records = (changed(each, loss=((9.0).hex(),)) if isinstance(each, StepRecord) else each for each in whole(150))
    other = write(tmp_path / "other.trace", *records)
    ends = [[end for end, content in frames(file.read_bytes()) if is_footer(content)] for file in (path, other)]
    mixed = tmp_path / "rank-0.trace"
    mixed.write_bytes(other.read_bytes()[: ends[1][0]] + path.read_bytes()[ends[0][0] :])
    assert read(mixed)[1]


def test_steps_that_change_after_they_were_read_are_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are looked at first: in a check, or where the first difference is looked for."""
    run = write_run(tmp_path)
    edit_trace(run, "chaos", 2, 1, only("step", put(rng="e" * 16), step=6))
    assert judge(run).status == "FAIL"
    path, drill_of, opened = run.leg("chaos").attempt(2).trace(1), module.Drill.of, module.judge_drill
    step_6 = [end for end, content in frames(path.read_bytes()) if is_step(content)][1]

    def damaged(found: Any) -> Any:
        data = bytearray(path.read_bytes())
        data[step_6 - 10] ^= 1
        path.write_bytes(data)
        trace_reader._opened.cache_clear()
        return found

    for name, owner, original in (("of", module.Drill, drill_of), ("judge_drill", module, opened)):
        sound = path.read_bytes()
        with monkeypatch.context() as patched:
            # Before the drill is made of what was read, and after.
            patched.setattr(owner, name, lambda *a, _of=original, **k: _of(*damaged(a), **k))
            verdict = judge(run)
        assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "records_damaged"), verdict.cause
        path.write_bytes(sound)


def test_ends_are_those_of_the_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaosrun.records.trace_reader.ENDS_BYTES", 400)
    problems: list[str] = []
    ends, everything = read_ends(path, 1, 0, problems), read(path)[0]
    assert not problems and ends.start == everything.start and ends.end
    assert list(ends.steps.values()) == list(everything.steps.values())[-len(ends.steps) :] and len(ends.steps) < 150
    assert read_start(path) == everything.start
    assert [moment.step for moment in read_moments(path)] == list(range(151))
    assert read_moments(path, at_most=2) == read_moments(path)[:2]


def test_the_rates_that_a_beginning_was_found_with_are_held_against_alone(tmp_path: Path) -> None:
    built = ((0.5).hex(),)
    for first, expected in ((0, built), (4, None)):
        trace = write(tmp_path / f"{first}.trace", changed(start(first), rates=built))
        assert [moment.rates for moment in read_moments(trace)] == [expected]


def test_a_trace_of_lines_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    trace = run.leg("chaos").attempt(2).trace(1)
    trace.rename(trace.with_suffix(".trace.jsonl"))
    verdict = judge(run)
    assert verdict.status == "INCONCLUSIVE" and "written by an earlier chaosrun" in verdict.cause


def test_any_reader_of_messagepack_reads_it(path: Path) -> None:
    """As docs/traces.md tells it."""
    data, at, kinds = path.read_bytes(), 0, list[str]()
    while at < len(data):
        size = int.from_bytes(data[at : at + 2], "big")
        value = msgspec.msgpack.decode(data[at + 3 : at + 3 + size])
        value = msgspec.msgpack.decode(zlib.decompress(value)) if isinstance(value, bytes) else value
        kinds.append(value["kind"] if isinstance(value, dict) else "block" if value[0] == "block" else "step")
        at += 3 + size + 2
    assert (kinds[:3], kinds.count("step"), kinds.count("block"), kinds[-1]) == (["start", "buckets", "step"], 150, 5, "end")


def test_a_step_takes_less_than_80_bytes(tmp_path: Path) -> None:
    """Of 100 tensors, and 8 samples of a million."""
    ids = tuple(1_000_000 - number for number in range(4))
    steps = [step(number, ids=(ids,), loss=((0.5).hex(),)) for number in range(1, 641)]
    path = write(tmp_path / "rank-0.trace", start(0, tensors=100), *steps)
    empty = write(tmp_path / "empty.trace", start(0, tensors=100))
    assert (path.stat().st_size - empty.stat().st_size) / len(steps) < 80


def test_words_that_only_one_leg_holds_are_no_difference(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_ranks(run, "chaos", 4, only("step", put(grads="", params=""), step=10))
    assert judge(run).status == "PASS"
    edit_trace(run, "chaos", 4, 1, only("step", put(param="e" * 16), step=10))
    verdict = judge(run)
    assert verdict.divergence and (verdict.divergence.step, verdict.divergence.tensor) == (10, None)


def test_flips_in_a_run_are_never_a_pass(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sound")
    name = run.leg("chaos").attempt(2).trace(1).relative_to(run.path)
    other = RunLayout(Path(shutil.copytree(run.path, tmp_path / "other")))
    for _, data in flips((run.path / name).read_bytes())[::97]:
        (other.path / name).write_bytes(data)
        assert judge(other).status == "INCONCLUSIVE"


def test_the_command_prints_a_line_for_each_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs")
    where = [str(run.path), "--attempt", "2", "--rank", "1"]
    assert cli.main(["trace", *where]) == 0
    lines = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert lines[0]["kind"] == "start" and {(line["leg"], line["attempt"], line["rank"]) for line in lines} == {("chaos", 2, 1)}
    assert [line["step"] for line in lines if line["kind"] == "step"] == [5, 6, 7, 8, 9]
    assert cli.main(["trace", str(run.path), "--leg", "reference", "--rank", "9"]) == 2
    assert "no such trace" in capsys.readouterr().err


def test_threads_write_one_after_the_other(path: Path, tmp_path: Path) -> None:
    """A script's own thread tells of what it saves while the training goes on."""
    writer = TraceWriter(tmp_path / "threads.trace")
    start = read_trace(path, 1, 0, []).start
    assert start is not None
    writer.write(start)
    waiting = threading.Barrier(4)

    def tell(number: int) -> None:
        waiting.wait()
        for step in range(400):
            held = {f"{number}-{step}": "0" * 16}
            writer.write(SaveRecord(step=step, path=f"{number}", how="open", time_s=0.0, done=True, held=held))

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    problems: list[str] = []
    assert len(read_trace(tmp_path / "threads.trace", 1, 0, problems).saves) == 1600 and not problems
