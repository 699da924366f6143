"""The fork server, with real processes: what it reports, what it kills, and that nothing is left."""

import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaosrun.cluster.agent import IMPORT_ENVIRONMENT
from chaosrun.processes import ProcessIdentity, children, identify, is_alive, kill_marked, marked
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from tests.integration.ranks import TARGET, alive, eventually, make_orders, notes_of


class Server:
    """A fork server and the agent's end of its socket."""

    def __init__(self, preload: tuple[str, ...] = (), target: str = TARGET, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.channel, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chaosrun.cluster.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "CHAOSRUN_SESSION": self.mark, "OMP_NUM_THREADS": "1", **variables},
            start_new_session=True,
        )
        theirs.close()
        self._unread = b""
        self.seen: list[dict[str, Any]] = []
        self.temporary = Path(tempfile.mkdtemp(prefix="forkserver-"))
        environment = {"OMP_NUM_THREADS": None}
        self.send("configure", preload=preload, target=target, env=environment, standbys=3, temporary=str(self.temporary))

    def send(self, command: str, **fields: Any) -> None:
        self.channel.sendall(json.dumps({"command": command, **fields}).encode() + b"\n")

    def next(self, *, timeout_s: float = 120.0) -> dict[str, Any]:
        while b"\n" not in self._unread:
            assert select.select([self.channel], [], [], timeout_s)[0], f"no event in time; seen: {self.seen}"
            received = self.channel.recv(1 << 20)
            assert received, f"the fork server closed its end; seen: {self.seen}"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        event = json.loads(line)
        self.seen.append(event)
        return event

    def until(self, name: str) -> list[dict[str, Any]]:
        """Events up to and with the next one of that name."""
        events = [self.next()]
        while events[-1]["event"] != name:
            events.append(self.next())
        return events

    def start(self, orders: list[WorkerOrder], *, listen: bool = False) -> dict[str, Any]:
        self.send("start", attempt=orders[0].attempt, orders=[msgspec.to_builtins(order) for order in orders], listen=listen)
        event = self.next()
        assert event["event"] == "started"
        return {**event, "pids": {int(rank): pid for rank, pid in event["pids"].items()}}

    def end(self) -> None:
        self.channel.close()
        self.process.wait(timeout=120)
        assert marked(self.mark) == []
        assert self.process.returncode != 0 or not self.temporary.exists()

    def clean(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()
        shutil.rmtree(self.temporary, ignore_errors=True)
        kill_marked(self.mark)


@pytest.fixture
def server() -> Iterator[Server]:
    with ready(Server()) as server:
        yield server


@pytest.fixture
def with_torch() -> Iterator[Server]:
    """Where every rank needs torch, which is then imported once and not by each of them."""
    with ready(Server(("torch", "torch.utils.data", "torch.distributed"), **IMPORT_ENVIRONMENT)) as server:
        yield server


@contextmanager
def ready(server: Server) -> Iterator[Server]:
    try:
        assert server.next()["event"] == "ready"
        yield server
        server.end()
    finally:
        server.clean()


def identities(pids: list[int]) -> list[ProcessIdentity]:
    found = [identify(pid) for pid in pids]
    assert None not in found
    return [identity for identity in found if identity is not None]


def test_ranks_that_complete_are_reported_one_by_one_and_the_attempt_as_stopped(server: Server, tmp_path: Path) -> None:
    began_s = time.time()
    started = server.start(make_orders(tmp_path, "complete"))
    assert sorted(started["pids"]) == [0, 1, 2]
    assert started["port"] is None
    *exits, stopped = server.until("stopped")
    assert sorted(exit["rank"] for exit in exits) == [0, 1, 2]
    for exit in exits:
        assert exit["pid"] == started["pids"][exit["rank"]]
        assert (exit["exit_code"], exit["signal"], exit["completed"], exit["killed"]) == (0, None, True, False)
        assert began_s <= exit["died_s"] <= time.time()
    assert stopped == {"event": "stopped", "attempt": 1, "killed": []}


def test_a_script_may_replace_its_streams_by_anything(server: Server, tmp_path: Path) -> None:
    server.start(make_orders(tmp_path, "replace streams"))
    assert [exit["exit_code"] for exit in server.until("stopped")[:-1]] == [0, 0, 0]


def test_a_rank_has_its_own_session_output_environment_and_no_descriptor_of_the_server(server: Server, tmp_path: Path) -> None:
    server.start(make_orders(tmp_path, "print", workers=1))
    server.until("stopped")
    assert LegLayout(tmp_path).attempt(1).log(0).read_text() == "out of rank 0\nerr of rank 0\n"
    notes = notes_of(tmp_path, 0)
    assert notes["listen"] is None
    assert "OMP_NUM_THREADS" not in notes["environment"], "the setting for the imports must not reach the ranks"

    started = server.start(make_orders(tmp_path, "sleep", attempt=2, workers=1))
    pid = started["pids"][0]
    eventually(lambda: os.getsid(pid) == pid)
    folder = Path(f"/proc/{pid}/fd")
    log = LegLayout(tmp_path).attempt(2).log(0)
    eventually(lambda: folder.joinpath("1").readlink() == log)
    # The fourth is for the stacks of a rank that hangs, wherever its script leads 1 and 2.
    # And the memory that outlives it: its own, and the node's.
    held = ["/dev/null", *3 * [str(log)], *2 * [f"/memfd:chaosrun-rank-0-{copy} (deleted)" for copy in range(2)]]
    eventually(lambda: sorted(str(entry.readlink()) for entry in folder.iterdir()) == sorted(held))
    status = Path(f"/proc/{pid}/status").read_text()
    assert "SigBlk:\t0000000000000000" in status
    server.send("stop", attempt=2)
    server.until("stopped")


@pytest.mark.parametrize(
    ("do", "code"), [("quit", 0), ("fail", 7), ("raise", 1)], ids=["no end record", "exit code", "exception"]
)
def test_a_rank_that_ends_badly_takes_the_others_along(server: Server, tmp_path: Path, do: str, code: int) -> None:
    server.start(make_orders(tmp_path, ["sleep", do, "sleep"]))
    *exits, stopped = server.until("stopped")
    first, *others = exits
    assert (first["rank"], first["exit_code"], first["signal"], first["completed"]) == (1, code, None, False)
    assert {(exit["rank"], exit["signal"], exit["killed"]) for exit in others} == {(0, 9, True), (2, 9, True)}
    assert stopped["killed"] == [0, 2]
    if do == "raise":
        assert "ValueError: this rank raises" in LegLayout(tmp_path).attempt(1).log(1).read_text()


def test_ranks_that_leave_on_notice_are_not_hurried(server: Server, tmp_path: Path) -> None:
    server.start(make_orders(tmp_path, ["leave after rank 1", "leave", "leave after rank 1"]))
    *exits, stopped = server.until("stopped")
    assert exits[0]["rank"] == 1
    for exit in exits:
        assert (exit["exit_code"], exit["signal"], exit["completed"], exit["killed"]) == (85, None, False, False)
    assert stopped["killed"] == []


def test_the_exit_code_of_a_notice_alone_does_not_count(server: Server, tmp_path: Path) -> None:
    server.start(make_orders(tmp_path, ["leave after rank 1", "leave unsaid", "leave after rank 1"]))
    assert server.until("stopped")[-1]["killed"] == [0, 2]


def test_sigkill_of_a_rank_stops_the_attempt(server: Server, tmp_path: Path) -> None:
    for attempt in range(1, 6):
        started = server.start(make_orders(tmp_path, "sleep", attempt=attempt))
        victims = identities(list(started["pids"].values()))
        os.kill(started["pids"][1], signal.SIGKILL)
        *exits, stopped = server.until("stopped")
        assert (exits[0]["rank"], exits[0]["signal"], exits[0]["exit_code"], exits[0]["killed"]) == (1, 9, None, False)
        assert stopped["killed"] == [0, 2]
        assert alive(victims) == []


def test_loader_workers_die_with_the_attempt_before_it_is_called_stopped(with_torch: Server, tmp_path: Path) -> None:
    started = with_torch.start(make_orders(tmp_path, "loader"))
    workers = [pid for rank in range(3) for pid in notes_of(tmp_path, rank)["workers"]]
    everybody = identities([*started["pids"].values(), *workers])
    assert len(everybody) == 9
    os.kill(started["pids"][0], signal.SIGKILL)
    with_torch.until("stopped")
    assert alive(everybody) == []


def test_a_killed_rank_takes_the_probe_of_its_samples_along(server: Server, tmp_path: Path) -> None:
    started = server.start(make_orders(tmp_path, "probe", workers=1))
    probing = notes_of(tmp_path, 0)
    assert probing["parent"] == started["pids"][0]
    child = identities([probing["child"]])
    os.kill(started["pids"][0], signal.SIGKILL)
    exited, stopped = server.until("stopped")
    assert (exited["signal"], stopped["killed"]) == (signal.SIGKILL, [])
    assert alive(child) == []


def test_processes_that_left_the_group_of_their_rank_are_found(server: Server, tmp_path: Path) -> None:
    started = server.start(make_orders(tmp_path, "stray", workers=2))
    strays = identities([pid for rank in range(2) for pid in notes_of(tmp_path, rank)["strays"]])
    assert len(strays) == 4
    ended = server.next()
    assert (ended["rank"], ended["completed"]) == (0, True)
    os.kill(started["pids"][1], signal.SIGKILL)
    server.until("stopped")
    assert alive(strays) == []


def test_rank_0_gets_the_listening_socket_and_the_port_is_free_when_it_is_gone(with_torch: Server, tmp_path: Path) -> None:
    started = with_torch.start(make_orders(tmp_path, "rendezvous"), listen=True)
    port = started["port"]
    assert [notes_of(tmp_path, rank)["port"] for rank in range(3)] == [port] * 3
    os.kill(started["pids"][0], signal.SIGKILL)
    with_torch.until("stopped")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()


def test_a_semaphore_that_another_process_uses_is_left_alone(server: Server, tmp_path: Path) -> None:
    server.start(make_orders(tmp_path, "sleep", workers=1))
    # Made after the attempt began, by a process that is none of its own: mapped under another name than its entry has.
    lock = multiprocessing.get_context("spawn").Lock()
    server.send("stop", attempt=1)
    server.until("stopped")
    entry = Path(f"/dev/shm/sem.{lock._semlock.name.removeprefix('/')}")  # pyright: ignore[reportAttributeAccessIssue]
    assert entry.exists()


def test_what_killed_ranks_leave_in_shared_memory_is_removed_and_nothing_else(server: Server, tmp_path: Path) -> None:
    mine = Path("/dev/shm/psm_not_of_the_attempt")
    # Held open: attempts of other tests, at the same time on this machine, clean up after themselves, too.
    with mine.open("w"):
        server.start(make_orders(tmp_path, "shared memory", workers=2))
        left = [Path("/dev/shm") / notes_of(tmp_path, rank)["name"] for rank in range(2)]
        assert all(path.exists() for path in left)
        server.send("stop", attempt=1)
        server.until("stopped")
        assert [path for path in left if path.exists()] == []
        assert mine.exists()
    mine.unlink()


@pytest.mark.parametrize("killed", [False, True], ids=["end of the socket", "SIGKILL"])
def test_the_end_of_the_server_leaves_neither_ranks_nor_loader_workers(
    with_torch: Server, tmp_path: Path, killed: bool
) -> None:
    started = with_torch.start(make_orders(tmp_path, "loader"))
    workers = [pid for rank in range(3) for pid in notes_of(tmp_path, rank)["workers"]]
    everybody = identities([*started["pids"].values(), *workers])
    if killed:
        with_torch.process.kill()
    else:
        with_torch.channel.close()
    assert with_torch.process.wait(timeout=60) == (-signal.SIGKILL if killed else 0)
    eventually(lambda: not alive(everybody))


def test_an_agent_that_dies_while_its_server_imports_leaves_no_folder() -> None:
    server = Server()
    try:
        server.end()
        assert (server.process.returncode, server.temporary.exists()) == (0, False)
    finally:
        server.clean()


def test_fifty_restarts_leak_no_process_descriptor_or_memory(server: Server, tmp_path: Path) -> None:
    def descriptors() -> int:
        """The fewest of a while: where a standby is being forked there are more for a moment."""
        counts = []
        for _ in range(20):
            counts.append(len(os.listdir(f"/proc/{server.process.pid}/fd")))
            time.sleep(0.01)
        return min(counts)

    def resident_kib() -> int:
        # Counted page by page: VmRSS may be off by some hundred KiB for each processor.
        pages = Path(f"/proc/{server.process.pid}/smaps_rollup").read_text()
        return int(next(line for line in pages.splitlines() if line.startswith("Rss")).split()[1])

    def has_its_standbys() -> bool:
        return len(children(server.process.pid)) == 2

    ports: set[int] = set()
    before = (0, 0)
    for attempt in range(1, 51):
        started = server.start(make_orders(tmp_path, "sleep", attempt=attempt, workers=2), listen=True)
        ports.add(started["port"])
        os.kill(started["pids"][attempt % 2], signal.SIGKILL)
        server.until("stopped")
        if attempt == 5:
            eventually(has_its_standbys)
            before = (descriptors(), resident_kib())
    # Spares for two ranks are all there may be.
    eventually(has_its_standbys)
    eventually(lambda: descriptors() <= before[0])
    assert resident_kib() < before[1] + 2048
    assert len(ports) > 10


def test_standbys_are_used_replaced_and_their_deaths_survived(server: Server, tmp_path: Path) -> None:
    standbys = eventually(lambda: len(found := children(server.process.pid)) == 3 and found)
    first = server.start(make_orders(tmp_path, "complete"))
    assert sorted(first["pids"].values()) == standbys
    server.until("stopped")
    standbys = eventually(lambda: len(found := children(server.process.pid)) == 3 and found)
    os.kill(standbys[1], signal.SIGKILL)
    eventually(lambda: standbys[1] not in children(server.process.pid))
    second = server.start(make_orders(tmp_path, "complete", attempt=2))
    assert {standbys[0], standbys[2]} < set(second["pids"].values())
    assert not {standbys[1], *first["pids"].values()} & set(second["pids"].values())
    assert {exit["completed"] for exit in server.until("stopped")[:-1]} == {True}


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        ("import os\nSALT = os.urandom(8)\n", "recovery.preload: preloaded.SALT differs after every import"),
    ],
)
def test_a_preload_that_fails_or_draws_is_refused(tmp_path: Path, module: str, said: str) -> None:
    (tmp_path / "preloaded.py").write_text(module)
    server = Server(preload=("preloaded",), PYTHONPATH=os.pathsep.join([os.getcwd(), str(tmp_path)]))
    event = server.next()
    assert event["event"] == "failed" and said in event["message"]
    assert ("Traceback" in (event["traceback"] or "")) == (said == "no_such_module_anywhere")
    assert server.process.wait(timeout=60) == 1
    server.channel.close()


A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True, name='beats').start()\n"
A_THREAD_OF_C = """
import ctypes
identity, sleep = ctypes.c_ulong(), ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p)
assert ctypes.CDLL(None).pthread_create(ctypes.byref(identity), None, sleep, ctypes.c_void_p(600)) == 0
"""


@pytest.mark.parametrize("module", [A_THREAD, A_THREAD_OF_C], ids=["python", "native"])
@pytest.mark.parametrize("of_target", [False, True], ids=["preload", "target"])
def test_a_module_that_starts_a_thread_is_left_to_the_ranks(tmp_path: Path, module: str, of_target: bool) -> None:
    """Once in this process and its threads are there to stay; ranks have what they import themselves."""
    (tmp_path / "threaded.py").write_text(module)
    (tmp_path / "below.py").write_text("import threaded")  # known only once threaded is left out
    (tmp_path / "harmless.py").write_text("")
    (tmp_path / "target.py").write_text(
        "import os, sys, threaded\nfrom tests.integration.fork_targets import *\nfrom tests.integration import fork_targets\n"
        "def main(order, listen):\n    print(len(os.listdir('/proc/self/task')))\n    return fork_targets.main(order, listen)"
    )
    preload = ("harmless",) if of_target else ("harmless", "threaded", "below")
    path = os.pathsep.join([os.getcwd(), str(tmp_path)])
    with ready(Server(preload, "target:main" if of_target else TARGET, PYTHONPATH=path)) as server:
        (told,) = server.seen
        assert told["pid"] == server.process.pid
        left_out = {each["module"]: each["threads"] for each in told["left_out"]}
        assert list(left_out) == (["target"] if of_target else ["threaded", "below"])
        assert set(map(tuple, left_out.values())) == {("beats",) if module is A_THREAD else ("python",)}
        assert all(each["import_s"] > 0 for each in told["left_out"])
        assert len(os.listdir(f"/proc/{server.process.pid}/task")) == 1, "a fork would lose the other one"
        server.start(make_orders(tmp_path, "complete", workers=1))
        assert [exit["completed"] for exit in server.until("stopped")[:-1]] == [True]
        if of_target:
            assert LegLayout(tmp_path).attempt(1).log(0).read_text() == "2\n", "the rank has the thread"


def printed(folder: Path, imports: str, *lines: str, preload: tuple[str, ...] = ()) -> str:
    """What a rank prints by these lines of a target of its own, before it goes on as the usual one."""
    body = "".join(f"    {line}\n" for line in (*lines, "return fork_targets.main(order, listen)"))
    target = f"import {imports}\nfrom tests.integration import fork_targets\ndef main(order, listen):\n{body}"
    (folder / "target.py").write_text(target)
    with ready(Server(preload, "target:main", PYTHONPATH=os.pathsep.join([str(folder), os.getcwd()]))) as server:
        server.start(make_orders(folder, "complete", workers=1))
        assert [exit["completed"] for exit in server.until("stopped")[:-1]] == [True]
        return LegLayout(folder).attempt(1).log(0).read_text()


@pytest.mark.parametrize("installed", [True, False])
def test_what_accelerate_imports_to_prepare_a_loader_is_preloaded_where_it_is_installed(
    tmp_path: Path, installed: bool
) -> None:
    (tmp_path / "datasets.py").write_text("")
    hidden = "import sys\nsys.modules['datasets'] = None" if not installed else ""
    (tmp_path / "sitecustomize.py").write_text(hidden)
    line = "print(sys.modules.get('datasets') is not None)"
    assert printed(tmp_path, "sys", line, preload=("datasets",)) == f"{installed}\n"


def test_an_identity_is_not_fooled_by_another_process_of_the_same_pid() -> None:
    me = identify(os.getpid())
    assert me is not None and is_alive(me)
    assert not is_alive(ProcessIdentity(me.pid, me.start_ticks + 1))


def test_no_rank_takes_torchs_operators_back_one_by_one(tmp_path: Path) -> None:
    lines = (
        "own = torch.library.Library('own', 'DEF')",
        "kept = [each for each in weakref.finalize._registry if each.peek()[1] is torch.library._del_library]",
        "print(len(kept) > 1, [each.peek()[0] is own for each in kept if each.atexit])",
    )
    assert printed(tmp_path, "weakref, torch", *lines) == "True [True]\n"
