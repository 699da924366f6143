"""The life of one worker process, from the fork to its exit code: pin, join the rendezvous, run the script, record how it
ended.

The end record (`rank-R.end.json`, a `records.markers.WorkerEnd`) is what the agent and the supervisor judge by; an exit code
alone proves nothing (hazard P8).
"""

import atexit
import contextlib
import functools
import os
import runpy
import sys
import sysconfig
import threading
import time
import traceback
import types
from pathlib import Path

import torch

from chaosrun.checkpoint.storage_errors import before_again, place_of
from chaosrun.errors import WRITES_REFUSED, ChaosrunError, ResourcesError, UserScriptError
from chaosrun.faults.kind import LEFT_ON_NOTICE
from chaosrun.observe.file_guard import FileGuard
from chaosrun.observe.ledger import listen
from chaosrun.observe.opened import FileWatch
from chaosrun.observe.sources import record_sources
from chaosrun.processes import before_os_exit
from chaosrun.protocol import rendezvous
from chaosrun.protocol.context import WorkerContext, enter
from chaosrun.protocol.determinism import error_text, pin, refused_operation
from chaosrun.protocol.randomness import own_epoch
from chaosrun.protocol.script import ScriptTraining
from chaosrun.records.codec import changed, encode
from chaosrun.records.events import RaisedError
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RUN
from chaosrun.records.markers import WorkerEnd, read_markers
from chaosrun.records.order import WorkerOrder

PACKAGE, TORCH, STANDARD = Path(__file__).parents[1], Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib"))
HANDS_ON = ("hooks", "ledger", "probe", "writers")
"""Modules of `observe` through which the script's own calls, or calls of its code, go."""

A_TEXT = "sys.exit with a text is exit code 1, a failure for every launcher: if all is well, print the text and call sys.exit()"


def main(order: WorkerOrder, listen_fd: int | None) -> int:
    """Run one rank to its end and return the exit code. Called in a freshly forked process, output already in the rank's log.

    `listen_fd` is the listening socket of the rendezvous store, given to rank 0 alone: the port was never free in between, so
    no other process can have taken it (hazard P4), and it closes with this process.
    """
    context = WorkerContext(order)
    enter(context)
    store: object = None
    end = WorkerEnd(status="returned", exit_code=0)
    try:
        context.heart.open(context.leg.attempt(order.attempt).heartbeat(order.rank))
        context.heart.beat("started", 0)
        os.chdir(order.cwd)
        context.begin_a_writer(listen_fd)
        _set_up_leg(context)
        if order.by == "chaosrun":
            own_epoch()
            listen()
            rendezvous.skip_equal_broadcasts()
        context.preemption.begin()
        pin(seed=order.seed, deterministic=order.deterministic, threads=order.threads)
        context.faults.reach("rendezvous", 0, listen_fd=listen_fd)
        store = rendezvous.host_store(order, listen_fd)
        rendezvous.announce(order)
        if order.distributed_debug:
            rendezvous.name_parameters_in_errors()
        rendezvous.watch_rendezvous(context)
        if order.by == "script":
            context.script = ScriptTraining(context)
        context.heart.beat("script", 0)
        _run_script(order)
        _finish(context)
    except SystemExit as exit_request:
        end = _after_sys_exit(exit_request, context)
    except BaseException as error:  # any error of the script becomes this rank's end record
        with contextlib.suppress(Exception):  # the disk may be full, and the script may have closed or replaced sys.stderr
            traceback.print_exc()
        end = _raised("raised", error, order)
    end = _unless_refused(end, context)
    if end.error is None:
        # As the interpreter does at its end; not before the training's end, as our threads may save its last checkpoint.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    # Anything the script did after its rank left normally does not count.
    end = _unless_left_on_notice(context.left or end, context)
    if not _write_end(context, end):
        return ResourcesError.exit_code
    if end.error is None or end.status == LEFT_ON_NOTICE:
        context.heart.beat("leaving", context.step)
        if end.error is None:
            rendezvous.leave_process_group()
        atexit._run_exitfuncs()
    del store
    return end.exit_code


def begin(context: WorkerContext) -> None:
    """Begin to observe a rank started by a command, when it begins to train."""
    _set_up_leg(context)
    context.preemption.begin()
    context.faults.reach("rendezvous", 0, listen_fd=None)
    rendezvous.watch_rendezvous(context)
    context.script = ScriptTraining(context)


def end(context: WorkerContext, error: BaseException | None, exit_code: int = 0) -> None:
    """End such a rank: record how it ended and its exit code, and leave the process group cleanly."""
    end = WorkerEnd(status="returned", exit_code=exit_code)
    try:
        if error is None:
            _finish(context)
    except UserScriptError as unfinished:
        error = unfinished
    if error is not None:
        end = _raised("raised", error, context.order)
    if _recorded_complete(context, end):
        rendezvous.leave_process_group()


def _leave_by_os_exit(context: WorkerContext, code: int) -> None:
    """Handle a script that leaves by os._exit, skipping exit handlers and threads: with code 0 and its training done, that is
    its normal end."""
    order = context.order
    if code != 0 or context.leg.attempt(order.attempt).end(order.rank).exists():
        return
    if (end := _exited(context, waiting=False)) is not None and _recorded_complete(context, end):
        rendezvous.all_ranks_arrive()


def _finish(context: WorkerContext) -> None:
    """Handle a script that returned, or left with sys.exit(0). Raises UserScriptError when its training was not complete."""
    if context.training is not None:
        context.training.finish()
    if not context.finished:
        raise UserScriptError(
            "the script returned without training under chaosrun"
            + (" (run.batches() was never iterated)" if context.session else " (chaosrun.attach() was never called)"),
            hint="run = chaosrun.attach(accelerator) after prepare(), then loop over run.batches(loader, epochs=...)",
        )


def _recorded_complete(context: WorkerContext, end: WorkerEnd) -> bool:
    """Record how the rank ended. Returns whether its training was complete, and that could be recorded."""
    end = _unless_left_on_notice(_unless_refused(end, context), context)
    return _write_end(context, end) and end.error is None


def _write_end(context: WorkerContext, end: WorkerEnd) -> bool:
    """Record how the rank ended. False where the disk refuses it: then its heartbeat, which has its space, says so."""
    try:
        _write_end_record(context, end)
    except OSError as error:
        context.heart.beat("unrecorded", context.step)
        with contextlib.suppress(Exception):  # the script may have closed or replaced sys.stderr
            print(f"chaosrun: the end of this rank could not be recorded: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _write_end_record(context: WorkerContext, end: WorkerEnd) -> None:
    order = context.order
    completed = end.error is None
    if completed and order.rank == 0:
        record_sources(context.leg.inputs, Path(order.script))
    about = {"pid": os.getpid(), "completed": completed, "step": context.step, "time_s": time.time()}
    of_script = {"began_with": context.file_guard and context.file_guard.began_with, "own_sigterm": context.preemption.replaced}
    results = context.results
    end = changed(end, **about, **of_script, results=tuple(results.at_the_end), saves=results.saves())
    write_durably(context.leg.attempt(order.attempt).end(order.rank), encode(end))


def _unless_refused(end: WorkerEnd, context: WorkerContext) -> WorkerEnd:
    """The end record, but with chaosrun's own error if it refused something, whatever the script did with that error."""
    refused = context.file_guard and context.file_guard.refused
    return end if refused is None else _raised("raised", refused, context.order)


def _unless_left_on_notice(end: WorkerEnd, context: WorkerContext) -> WorkerEnd:
    """The end record of a script that handled its preemption notice itself: it left on notice, and is not complete."""
    order = context.order
    markers = read_markers(context.leg).values() if order.by == "script" else ()
    own = [marker for marker in markers if marker and (marker.rank, marker.attempt) == (order.rank, order.attempt)]
    told = context.preemption.has_handled_notice or any(marker.notice for marker in own)
    return context.preemption.end_of_script(end, context.step) if told else end


def _set_up_leg(context: WorkerContext) -> None:
    """Pass the script its leg, attempt and file locations, and watch for reads of other legs' files."""
    order, leg = context.order, context.leg
    leg.output.mkdir(exist_ok=True)
    told = {"CHAOSRUN_LEG": order.leg, "CHAOSRUN_ATTEMPT": str(order.attempt), "CHAOSRUN_OUTPUT": str(leg.output)}
    os.environ.update({**told, **order.resume_env})
    # A variable may name the leg's own folder.
    os.environ.update({name: leg.filled_in(value) for name, value in os.environ.items() if "{output}" in value})
    before_os_exit(functools.partial(_leave_by_os_exit, context))
    if order.by == "script" and order.leg != RUN:  # in production it writes where it would without chaosrun
        context.file_guard = FileGuard(order)
        context.file_guard.install()
    context.settling.listen()
    if order.earlier:
        context.files = FileWatch(order, leg)
        context.files.begin()


def _run_script(order: WorkerOrder) -> None:
    """Execute the script as `python script args` would: `__main__`, sys.argv, its directory first on the path; a module as
    `python -m module args`."""
    if order.module is not None:
        sys.argv = [order.module, *order.args]
        sys.path.insert(0, order.cwd)
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
        return
    script = Path(order.script)
    sys.argv = [str(script), *order.args]
    sys.path.insert(0, str(script.parent))
    main_module = types.ModuleType("__main__")
    main_module.__file__ = _in_the_leg(script, order)
    main_module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main_module
    exec(compile(script.read_bytes(), str(script), "exec"), main_module.__dict__)


def _in_the_leg(script: Path, order: WorkerOrder) -> str:
    """The script's path in its working folder, if it is found there: files that it writes next to itself are then the leg's
    own."""
    if order.by == "script" and script.is_relative_to(order.directory):
        inside = Path(order.cwd) / script.relative_to(order.directory)
        if inside.is_file():
            return str(inside)
    return str(script)


def _exited(context: WorkerContext, *, waiting: bool) -> WorkerEnd | None:
    """The end of a script that left with exit code 0, `waiting` for its threads; None: its training was not done."""
    if context.script is not None:
        try:
            context.script.finish(waiting=waiting)
        except UserScriptError as error:
            return _raised("exited", error, context.order)
    return WorkerEnd(status="exited", exit_code=0) if context.finished else None


def _after_sys_exit(request: SystemExit, context: WorkerContext) -> WorkerEnd:
    code = request.code if isinstance(request.code, int) else (0 if request.code is None else 1)
    if code == 0 and (end := _exited(context, waiting=True)):
        return end
    said = "" if request.code is None or isinstance(request.code, int) else f": {error_text(request.code)}"
    if said:
        with contextlib.suppress(Exception):  # as Python does; the script may have closed or replaced it
            print(said.removeprefix(": "), file=sys.stderr, flush=True)
    made = f"at step {context.step}" if context.step else "without a step in this attempt"
    left = f"the script left with sys.exit({code}) {made}"
    if context.script is not None or context.finished:
        hint = A_TEXT if said else _last_output(context)
        error = UserScriptError(f"{left}: only 0 says that its training is complete{said}", hint=hint)
    else:
        error = UserScriptError(
            f"{left}, before its training was done{said}",
            hint="the loop over run.batches() has to run to its end; after a deliberate break call run.finish()",
        )
    return changed(_raised("exited", error, context.order), exit_code=code or error.exit_code)


def _last_output(context: WorkerContext) -> str:
    """The script's last output, as argparse prints there what is wrong with the arguments."""
    log = context.leg.attempt(context.order.attempt).log(context.order.rank)
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    last = next((line for line in reversed(lines) if line.strip()), None)
    if last is None:
        return "its log is empty"
    return f"its log says why it did; last: {last[:200]}"


def _raised(status: str, error: BaseException, order: WorkerOrder) -> WorkerEnd:
    described = _describe(error, order)
    return WorkerEnd(status=status, exit_code=described.exit_code or 0, error=described)


def _describe(error: BaseException, order: WorkerOrder) -> RaisedError:
    if isinstance(error, OSError) and error.errno in WRITES_REFUSED:
        leg = Path(order.leg_path)
        told = ResourcesError(
            f"rank {order.rank} could not write to {place_of(error, leg)}: {error.strerror}",
            hint=f"{before_again(error, leg)}, or put the run elsewhere with --root",
        )
    else:
        told = error if isinstance(error, ChaosrunError) else refused_operation(error, order.deterministic)
    storage = error.__cause__ if isinstance(error, ResourcesError) else None
    return RaisedError(
        type=type(error).__name__,
        message=told.message if told else error_text(error),
        hint=told.hint if told else None,
        exit_code=told.exit_code if told else UserScriptError.exit_code,
        traceback=_script_traceback(error),
        ours=told is None and _is_ours(error),
        errno=storage.errno if isinstance(storage, OSError) else None,
        fault=getattr(error, "chaosrun_fault", None),
    )


def _is_ours(error: BaseException) -> bool:
    """Whether an error that is not of chaosrun's types was raised by chaosrun's own code, and not by what that calls: torch,
    the script. An error of torch or Python is also chaosrun's where the calling code only observes and forwards no call of the
    script.

    A RuntimeError may come from native code that torch's operations run, an OSError from the machine.
    """
    machine = isinstance(error, OSError | MemoryError | RuntimeError) and not isinstance(error, NotImplementedError)
    if error.__traceback__ is None or machine:
        return False
    frames = [(frame.f_code, Path(frame.f_code.co_filename)) for frame, _line in traceback.walk_tb(error.__traceback__)]
    code, raiser = frames[-1]
    if raiser.is_relative_to(PACKAGE):
        # A script that cannot be compiled raises here; what a fault raises is planned.
        return code is not _run_script.__code__ and raiser.parent != PACKAGE / "faults"
    caller = next((path for _, path in reversed(frames) if not path.is_relative_to(TORCH) and not _is_python(path)), raiser)
    return caller.is_relative_to(PACKAGE / "observe") and caller.stem not in HANDS_ON


def _is_python(path: Path) -> bool:
    """Whether a file is of the standard library, or frozen into the interpreter."""
    return not path.is_absolute() or (path.is_relative_to(STANDARD) and "site-packages" not in path.parts)


def _script_traceback(error: BaseException) -> str:
    """The traceback from the script's own first frame on; to its own last one, where chaosrun refused what it did."""
    ours = str(PACKAGE) if isinstance(error, ChaosrunError) else __file__
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list([each for each in told.stack if not each.filename.startswith(ours)])
    return "".join(told.format())
