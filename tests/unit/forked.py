"""Programs, each in a process of its own, forked from one that has imported what they all need: torch takes seconds."""

import json
import subprocess
import sys
from collections.abc import Sequence

EACH = """
import json, os, sys
imports, *programs = json.load(sys.stdin)
exec(imports)
for program in programs:
    if os.fork() == 0:
        exec(program, {"__name__": "__main__"})
        sys.exit()
    if os.wait()[1]:
        sys.exit(f"failed: {program}")
    print("END", flush=True)
"""


def printed(imports: str, programs: Sequence[str]) -> dict[str, str]:
    """What each prints, by its text."""
    asked = json.dumps([imports, *programs])
    ended = subprocess.run([sys.executable, "-c", EACH], input=asked, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(zip(programs, ended.stdout.split("END\n"), strict=False))
