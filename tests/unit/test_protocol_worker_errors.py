"""Whose code raised what ended a worker: chaosrun's own, or the script's and what both of them call."""

import errno
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from chaosrun.cli.options import one_or_more
from chaosrun.errors import MisuseError, ResourcesError, UsageError
from chaosrun.observe.fingerprint import tensor_digest
from chaosrun.protocol import worker
from chaosrun.protocol.context import WorkerContext
from chaosrun.protocol.script import ScriptTraining
from chaosrun.records.codec import encode
from chaosrun.records.heartbeat import read_heartbeat
from chaosrun.records.layout import LegLayout
from tests.integration.ranks import make_orders

ORDER = make_orders(Path("/nowhere"), "", workers=1)[0]


def of_ours() -> object:
    return tensor_digest(torch.empty(3, device="meta"))


def of_torch() -> object:
    return torch.nn.Linear(2, 2)(None)


def of_script() -> object:
    return {}["nothing"]


def on_purpose() -> object:
    raise MisuseError("attach twice")


@pytest.mark.parametrize(("raiser", "ours"), [(of_ours, True), (of_torch, False), (of_script, False), (on_purpose, False)])
def test_whose_code_raised(tmp_path: Path, raiser: Callable[[], object], ours: bool) -> None:
    with pytest.raises(Exception) as caught:
        raiser()
    assert worker._describe(caught.value, ORDER).ours is ours


@pytest.mark.parametrize(
    ("places", "ours"),
    [
        (("observe/trace.py",), True),
        (("observe/hooks.py",), False),
        (("observe/trace.py", "/job/train.py"), False),
        (("protocol/session.py",), False),
    ],
)
@pytest.mark.parametrize("called", ["json.loads(7)", "torch.nn.Linear(2, 2).forward()", "torch.set_rng_state(7)"])
def test_what_torch_and_python_raise_is_told_of_who_calls_them_to_look(
    places: tuple[str, ...], called: str, ours: bool
) -> None:
    call: Callable[[], object] = eval(compile(f"lambda: {called}", "<frozen beside>", "eval"), {"json": json, "torch": torch})
    for place in reversed(places):
        call = eval(compile("lambda: call()", str(worker.PACKAGE / place), "eval"), {"call": call})
    with pytest.raises((TypeError, AttributeError)) as caught:
        call()
    assert worker._is_ours(caught.value) is ours


def test_a_script_that_cannot_be_compiled_is_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("def (:\n")
    order = make_orders(tmp_path, "", workers=1)[0]
    for name in ("argv", "path"):
        monkeypatch.setattr(worker.sys, name, [])
    monkeypatch.setattr(worker.sys, "modules", dict(worker.sys.modules))
    with pytest.raises(SyntaxError) as caught:
        worker._run_script(replace(order, script=str(script)))
    assert worker._describe(caught.value, order).ours is False


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such file: \udcff.bin"), "no such file: \udcff.bin"),
        (MisuseError("not loaded: \udcff.bin"), "not loaded: \udcff.bin"),
        (OSError(28, "No space left", "/nowhere/\udcff.bin"), "rank 0 could not write to /nowhere/\udcff.bin: No space left"),
        (OSError(30, "Read-only file system", "/data/a"), "rank 0 could not write to /data/a: Read-only file system"),
        (Unspeakable(), "its __str__ raised KeyError"),
    ],
)
def test_an_error_is_recorded_whatever_its_text_holds(error: Exception, message: str) -> None:
    described = worker._describe(error, ORDER)
    assert described.message == message
    assert encode(described)


RANK_ON_A_REFUSING_DISK = """
import os, pickle, sys
from chaosrun.protocol import worker
from chaosrun.protocol.context import WorkerContext

number = int(sys.argv[2])

def refuse(*_):
    raise OSError(number, "refused")

worker.write_durably = refuse
with open(sys.argv[1], "rb") as file:
    order = pickle.load(file)
if order.by == "script":
    context = WorkerContext(order)
    context.heart.open(context.leg.attempt(1).heartbeat(1))
    worker.end(context, RuntimeError("mine"))  # of a command's rank: nothing of ours is raised in its process
    os._exit(7)
os._exit(worker.main(order, None))
"""


@pytest.mark.parametrize("by", ["chaosrun", "script"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE])
def test_a_rank_that_cannot_write_down_its_end_leaves_with_the_code_for_that(tmp_path: Path, number: int, by: Any) -> None:
    (tmp_path / "train.py").write_text("raise OSError('no more')\n")
    order = replace(make_orders(tmp_path, str(tmp_path / "train.py"), workers=2)[1], by=by)
    LegLayout(Path(order.leg_path)).attempt(1).path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "order").write_bytes(pickle.dumps(order))
    done = subprocess.run([sys.executable, "-c", RANK_ON_A_REFUSING_DISK, str(tmp_path / "order"), str(number)], timeout=300)
    assert done.returncode == ResourcesError.exit_code
    beat = read_heartbeat(LegLayout(Path(order.leg_path)).attempt(1).heartbeat(1))
    assert beat and beat.stage == "unrecorded"


@pytest.mark.parametrize("code", ["no more data", Unspeakable()])
def test_what_sys_exit_says_is_printed_and_no_error_of_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: object
) -> None:
    context = WorkerContext(replace(make_orders(tmp_path, "", workers=1)[0], by="script"))
    context.script = cast(ScriptTraining, SimpleNamespace(position=SimpleNamespace(step=7)))  # its training has begun
    end = worker._after_sys_exit(SystemExit(code), context)
    assert end.error and encode(end) and end.exit_code == 1
    assert end.error.hint == worker.A_TEXT
    assert end.error.message.endswith(f": {capsys.readouterr().err.rstrip()}")


@pytest.mark.parametrize("of_script", [SimpleNamespace(write=len), None])
def test_sys_exit_ends_a_rank_whatever_the_script_made_of_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_script: object
) -> None:
    context = WorkerContext(replace(make_orders(tmp_path, "", workers=1)[0], by="script"))
    monkeypatch.setattr(worker.sys, "stderr", of_script)
    end = worker._after_sys_exit(SystemExit("no more data"), context)
    assert end.error and end.exit_code and "no more data" in end.error.message


def test_a_refusal_shows_where_the_script_was_and_not_where_chaosrun_was() -> None:
    with pytest.raises(UsageError) as caught:
        one_or_more("--at-once", 0)
    shown = worker._script_traceback(caught.value)
    assert "test_protocol_worker_errors.py" in shown and str(worker.PACKAGE) not in shown


def test_a_script_that_leaves_is_told_by_its_last_words(tmp_path: Path) -> None:
    order = replace(make_orders(tmp_path, "", workers=1)[0], by="script")
    context = WorkerContext(order)
    log = context.leg.attempt(order.attempt).log(order.rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("usage: mine [-h]\nmine: error: unrecognized arguments: --epochs\n\n")
    assert worker._last_output(context).endswith("last: mine: error: unrecognized arguments: --epochs")
    log.write_text("")
    assert worker._last_output(context).endswith("its log is empty")
