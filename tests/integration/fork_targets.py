"""What ranks do in the tests of the fork server and the agent; the first argument of the order says which."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from chaosrun.faults.kind import LEFT_ON_NOTICE, PREEMPTED_EXIT_CODE
from chaosrun.records.codec import encode
from chaosrun.records.layout import AttemptLayout, LegLayout
from chaosrun.records.markers import WorkerEnd
from chaosrun.records.order import WorkerOrder

NOTES = "notes.json"


def main(order: WorkerOrder, listen_fd: int | None) -> int:
    attempt = LegLayout(Path(order.leg_path)).attempt(order.attempt)
    match order.args[0]:
        case "sleep":
            time.sleep(600)
        case "say and sleep":
            note(attempt, order)
            time.sleep(600)
        case "exec sleep":
            os.execvp("sleep", ["sleep", "600"])
        case "print":
            print(f"out of rank {order.rank}")
            print(f"err of rank {order.rank}", file=sys.stderr)
            note(attempt, order, args=sys.argv, listen=listen_fd, environment=dict(os.environ), niceness=os.nice(0))
            complete(attempt, order)
        case "complete":
            complete(attempt, order)
        case "quit":
            pass
        case "replace streams":
            sys.stdout, sys.stderr = None, object()  # pyright: ignore[reportAttributeAccessIssue]
            complete(attempt, order)
        case "fail":
            return 7
        case "leave":
            note(attempt, order, pid=os.getpid())
            return leave_on_notice(attempt, order)
        case "leave after rank 1":
            wait_for_the_end_of_rank_1(attempt)
            return leave_on_notice(attempt, order)
        case "leave unsaid":
            note(attempt, order, pid=os.getpid())
            return PREEMPTED_EXIT_CODE
        case "raise":
            raise ValueError("this rank raises")
        case "loader":
            load_data(attempt, order)
        case "probe":
            probe_a_slow_dataset(attempt, order)
        case "stray":
            leave_strays(attempt, order)
            if order.rank == 0:
                complete(attempt, order)
                return 0
            time.sleep(600)
        case "rendezvous":
            rendezvous(attempt, order, listen_fd)
        case "shared memory":
            leave_shared_memory(attempt, order)
        case unknown:
            raise AssertionError(unknown)
    return 0


def leave_on_notice(attempt: AttemptLayout, order: WorkerOrder) -> int:
    end = WorkerEnd(status=LEFT_ON_NOTICE, exit_code=PREEMPTED_EXIT_CODE, told=1)
    attempt.end(order.rank).write_bytes(encode(end))
    return PREEMPTED_EXIT_CODE


def wait_for_the_end_of_rank_1(attempt: AttemptLayout) -> None:
    """Until the fork server has seen it: by then whoever is to be killed over it has been."""
    said = attempt.path / f"rank-1.{NOTES}"
    while not said.exists():
        time.sleep(0.01)
    pid = json.loads(said.read_text())["pid"]
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def complete(attempt: AttemptLayout, order: WorkerOrder) -> None:
    attempt.end(order.rank).write_bytes(encode(WorkerEnd(status="returned", exit_code=0, completed=True)))


def note(attempt: AttemptLayout, order: WorkerOrder, **notes: object) -> None:
    """Tell the test something, whole or not at all."""
    target = attempt.path / f"rank-{order.rank}.{NOTES}"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(notes))
    temporary.rename(target)


def load_data(attempt: AttemptLayout, order: WorkerOrder) -> None:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(range(1 << 20), batch_size=1, num_workers=2, generator=torch.Generator())  # pyright: ignore[reportArgumentType]
    batches = iter(loader)
    next(batches)
    workers = [worker.pid for worker in batches._workers]  # pyright: ignore[reportAttributeAccessIssue]
    note(attempt, order, workers=workers)
    time.sleep(600)


def probe_a_slow_dataset(attempt: AttemptLayout, order: WorkerOrder) -> None:
    from torch.utils.data import DataLoader, Dataset

    from chaosrun.observe import probe

    class Slow(Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            note(attempt, order, child=os.getpid(), parent=os.getppid())
            time.sleep(600)
            return index

    probe.BUDGET_S = 600.0
    probe.probe(DataLoader(Slow()))


def leave_strays(attempt: AttemptLayout, order: WorkerOrder) -> None:
    """A process in a session of its own, whose child has yet another: no process group reaches them."""
    code = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    stray = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    assert stray.stdout is not None
    note(attempt, order, strays=[stray.pid, int(stray.stdout.readline())])


def rendezvous(attempt: AttemptLayout, order: WorkerOrder, listen_fd: int | None) -> None:
    from torch.distributed import TCPStore

    store = TCPStore(order.master_addr, order.master_port, order.world_size, order.rank == 0, master_listen_fd=listen_fd)
    store.set(f"rank {order.rank}", "here")
    store.wait([f"rank {rank}" for rank in range(order.world_size)])
    note(attempt, order, port=order.master_port)
    time.sleep(600)


def leave_shared_memory(attempt: AttemptLayout, order: WorkerOrder) -> None:
    from multiprocessing import resource_tracker
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")
    note(attempt, order, name=memory.name)
    time.sleep(600)
