"""Programs, each in a process of its own, forked from one that has imported what they all need: torch takes seconds."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

EACH = """
import json, os, sys
imports, *programs = json.load(sys.stdin)
given = {}
exec(imports, given)
for program in programs:
    if os.fork() == 0:
        exec(program, {**given, "__name__": "__main__"})
        sys.exit()
    if os.wait()[1]:
        sys.exit(f"failed: {program}")
    print("END", flush=True)
"""


def printed(imports: str, programs: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What each prints, by its text. It has what is imported and defined by `imports`."""
    ended = subprocess.run(
        [sys.executable, "-c", EACH],
        input=json.dumps([imports, *programs]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(programs, ended.stdout.split("END\n"), strict=False))
