"""Commands that start the ranks of a node themselves: who becomes a rank, how deaths are seen, what is said when one fails."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.command import TARGET
from chaosrun.processes import identify, is_alive, marked, wait_gone
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import read_end
from tests.integration.ranks import eventually, make_orders
from tests.integration.test_forkserver import Server, ready

HERE = Path(__file__).parent / "commanded"
TRAIN, RELAUNCH, FORKED, IN_A_THREAD = (
    str(HERE / name) for name in ("train.py", "relaunch.py", "forked.py", "default_worker.py")
)
BIN = Path(sys.executable).parent
TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node", "{workers_per_node}")
FOR_EVER = "100000"


@pytest.fixture
def server() -> Iterator[Server]:
    with ready(Server(target=TARGET)) as server:
        yield server


def start(server: Server, leg: Path, *command: str, workers: int = 2, **about: Any) -> None:
    orders = [replace(order, args=(), command=command, by="script", **about) for order in make_orders(leg, [""] * workers)]
    started = server.start(orders, listen=True)
    assert started["pids"] == {} and started["port"]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def all_announced(server: Server, workers: int = 2) -> dict[int, int]:
    """pids by rank."""
    events = [server.next() for _ in range(workers)]
    assert {event["event"] for event in events} == {"announced"}
    return {event["rank"]: event["pid"] for event in events}


@pytest.mark.nightly
def test_the_ranks_of_torchrun_announce_themselves_and_end(server: Server, tmp_path: Path) -> None:
    start(server, tmp_path, *TORCHRUN, TRAIN, "3", "--loader-workers", "2")
    announced = all_announced(server)
    *exits, stopped = server.until("stopped")
    assert {event["rank"]: (event["pid"], event["exit_code"], event["completed"]) for event in exits} == {
        rank: (pid, 0, True) for rank, pid in announced.items()
    }, "loader workers and the launcher are no ranks"
    assert stopped == {"event": "stopped", "attempt": 1, "killed": []}
    attempt = LegLayout(tmp_path).attempt(1)
    for rank in (0, 1):
        assert f"rank {rank} trains, attempt 1" in attempt.log(rank).read_text()
        end = read_end(attempt, rank)
        assert end and end.completed and end.pid == announced[rank]


def test_a_rank_that_is_killed_takes_the_others_and_the_launcher_along_at_once(server: Server, tmp_path: Path) -> None:
    # torchrun, which looks now and then, is not to end the others first.
    start(server, tmp_path, *TORCHRUN, "--monitor-interval", "5", "--max-restarts", "3", TRAIN, FOR_EVER)
    announced = all_announced(server)
    launcher = identify(int(Path(f"/proc/{announced[0]}/stat").read_text().split()[3]))
    os.kill(announced[1], signal.SIGKILL)
    *exits, stopped = server.until("stopped")
    how = {event["rank"]: (event["signal"], event["killed"], event["completed"]) for event in exits}
    assert how == {1: (signal.SIGKILL, False, False), 0: (signal.SIGKILL, True, False)}
    assert exits[0]["rank"] == 1 and stopped["killed"] == [0]
    assert launcher and not is_alive(launcher)


def test_nothing_of_a_command_outlives_a_fork_server_that_is_killed_outright(server: Server, tmp_path: Path) -> None:
    """As Ray kills it with the agent, when its driver dies: the ranks, children of torchrun's, trained on."""
    start(server, tmp_path, *TORCHRUN, TRAIN, FOR_EVER)
    ranks = [identify(pid) for pid in all_announced(server).values()]
    server.process.kill()
    server.process.wait()
    assert None not in ranks and not wait_gone([rank for rank in ranks if rank], timeout_s=30)
    eventually(lambda: not marked(server.mark))


@pytest.mark.nightly
def test_a_status_that_the_launcher_has_collected_is_told_all_the_same_or_said_to_be_unknown(
    server: Server, tmp_path: Path
) -> None:
    # Waits for its one rank in the kernel, and is as fast as we are.
    start(server, tmp_path, sys.executable, RELAUNCH, "1", sys.executable, TRAIN, FOR_EVER, workers=1)
    announced = all_announced(server, 1)
    os.kill(announced[0], signal.SIGKILL)
    exited, _ = server.until("stopped")
    assert (exited["signal"] == signal.SIGKILL) != exited["collected"]


@pytest.mark.nightly
def test_a_launcher_that_starts_its_ranks_again_is_refused(server: Server, tmp_path: Path) -> None:
    start(server, tmp_path, sys.executable, RELAUNCH, "2", sys.executable, TRAIN, "1", workers=1)
    all_announced(server, 1)
    exited, failed, stopped = server.until("stopped")
    assert exited["completed"]
    assert (failed["event"], failed["code"], failed["rank"]) == ("launcher_failed", "launcher_restarts", 0)
    assert stopped["killed"] == []


def test_a_command_that_starts_another_number_of_ranks_is_refused(server: Server, tmp_path: Path) -> None:
    start(server, tmp_path, sys.executable, TRAIN, FOR_EVER, workers=2)
    failed, _ = server.until("stopped")
    assert (failed["code"], failed["rank"], failed["seen"]) == ("other_world_size", 0, 1)


@pytest.mark.parametrize(
    ("command", "exit_code", "said"),
    [
        (("no-such-launcher", "train.py"), 127, "cannot start no-such-launcher: No such file or directory"),
        ((sys.executable, "no_such_script.py"), 2, "No such file or directory"),
        ((sys.executable, "-c", "print('done')"), 0, "done"),
    ],
)
def test_a_command_that_ends_without_ranks_is_told_with_what_it_said_last(
    server: Server, tmp_path: Path, command: tuple[str, ...], exit_code: int, said: str
) -> None:
    start(server, tmp_path, *command)
    failed, stopped = server.until("stopped")
    assert (failed["code"], failed["announced"], failed["exit_code"]) == ("launcher_ended", 0, exit_code)
    assert said in failed["said"]
    assert stopped["killed"] == []


@pytest.mark.nightly
def test_a_rank_that_leaves_with_an_exit_code_has_not_completed(server: Server, tmp_path: Path) -> None:
    start(server, tmp_path, sys.executable, TRAIN, "1", "--exit-code", "3", workers=1)
    all_announced(server, 1)
    exited, _ = server.until("stopped")
    assert (exited["exit_code"], exited["completed"]) == (3, False)


def test_ranks_that_multiprocessing_forks_write_down_how_they_ended(server: Server, tmp_path: Path) -> None:
    """They leave by os._exit: no exit handler of theirs runs."""
    start(server, tmp_path, sys.executable, FORKED, "2", "3")
    announced = all_announced(server)
    *exits, _ = server.until("stopped")
    assert [(event["exit_code"], event["completed"]) for event in exits] == [(0, True)] * 2
    ends = [read_end(LegLayout(tmp_path).attempt(1), rank) for rank in (0, 1)]
    assert [end and (end.completed, end.pid) for end in ends] == [(True, announced[rank]) for rank in (0, 1)]


def test_the_end_of_the_thread_in_which_a_worker_of_ray_trains_is_its_end(server: Server, tmp_path: Path) -> None:
    """The process has other threads, as Ray's workers have, which end with it."""
    start(server, tmp_path, sys.executable, IN_A_THREAD, "2", workers=1)
    announced = all_announced(server, 1)
    exited, *_ = server.until("stopped")
    assert (exited["pid"], exited["signal"], exited["completed"]) == (announced[0], signal.SIGKILL, True)


@pytest.mark.nightly
def test_the_ranks_of_accelerate_launch_announce_themselves(server: Server, tmp_path: Path) -> None:
    launch = (str(BIN / "accelerate"), "launch", "--num_machines", "1", "--num_processes", "2", "--main_process_port")
    start(server, tmp_path, *launch, "{master_port}", "--multi_gpu", TRAIN, "2")
    all_announced(server)
    *exits, _ = server.until("stopped")
    assert [event["completed"] for event in exits] == [True, True]
    # On a machine without GPUs accelerate starts one process, whatever the number, unless it is told more.
    start(server, tmp_path, *launch, "{master_port}", TRAIN, "2")
    failed, _ = server.until("stopped")
    assert (failed["code"], failed["seen"]) == ("other_world_size", 1)
