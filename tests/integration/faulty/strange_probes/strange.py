"""A probe that does what a test asks for: it answers, raises, dies or hangs, and leaves processes behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def probe(**parameters: Any) -> dict[str, Any]:
    print("printed by a library", flush=True)
    if "leave" in parameters:
        leave_a_process(Path(parameters["leave"]))
    match parameters["do"]:
        case "answer":
            wait_for(parameters.get("until"))
            told = [name for name in os.environ if name.startswith(("RAY_", "OMP_")) or name == parameters.get("variable")]
            return {"pid": os.getpid(), "environment": told, "filler": "x" * parameters.get("bytes", 0)}
        case "raise":
            raise OSError("it went wrong")
        case "die":
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "leave":
            os._exit(3)
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
    return {}


def wait_for(path: str | None) -> None:
    while path is not None and not os.path.exists(path):
        time.sleep(0.01)


def leave_a_process(path: Path) -> None:
    """A grandchild in a session of its own, whose parent is gone; its pid is in the file."""
    program = (
        "import subprocess as s, sys;"
        "print(s.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=s.DEVNULL, start_new_session=True).pid)"
    )
    path.write_bytes(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, env={}, check=True).stdout)
