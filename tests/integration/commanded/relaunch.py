"""A launcher of a team's own, which runs a command, and again, and again: `relaunch.py TIMES COMMAND...`."""

import subprocess
import sys

for _ in range(int(sys.argv[1])):
    subprocess.run(sys.argv[2:], check=False)
