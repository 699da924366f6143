"""How a process leaves."""

import os
import subprocess
import sys
import time

import pytest

from chaosrun.processes import identify, is_alive, state_of

LEAVES = """\
import os, sys, threading
from chaosrun.processes import before_os_exit, leave_at_once

before_os_exit(lambda code: print("told", code, flush=True))
if sys.argv[1] == "child":
    child = os.fork()
    os._exit(3) if child == 0 else print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
elif sys.argv[1] == "thread":
    threading.Thread(target=os._exit, args=[0]).start()
    threading.Event().wait()
elif sys.argv[1] == "raises":
    before_os_exit(lambda code: 1 / 0)
    os._exit(4)
elif sys.argv[1] == "itself":
    leave_at_once(0)
os._exit(5)
"""


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [("plainly", 5, "told 5"), ("child", 5, "3\ntold 5"), ("thread", 0, "told 0"), ("raises", 4, ""), ("itself", 0, "")],
)
def test_the_end_by_os_exit_is_told(how: str, code: int, told: str) -> None:
    left = subprocess.run([sys.executable, "-c", LEAVES, how], stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    assert (left.returncode, left.stdout.strip()) == (code, told)


def test_a_process_with_a_thread_is_alive_though_its_main_thread_has_ended() -> None:
    program = """
import ctypes, threading
threading.Thread(target=threading.Event().wait).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        identity = identify(process.pid)
        assert identity is not None
        while state_of(identity) != "Z":
            time.sleep(0.01)
        before = is_alive(identity)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (before, is_alive(identity)) == (True, False)  # now a zombie, which nobody has waited for yet
