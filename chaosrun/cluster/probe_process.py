"""A probe's process: `python -m chaosrun.cluster.probe_process MODULE`, parameters on stdin, facts on stdout, both JSON.

What the probe itself prints goes to stderr. An answer is {"facts": …} or {"error": …}; a process that gives none has died.
"""

import importlib
import json
import os
import sys

import msgspec


def main(module: str) -> None:
    answers = os.dup(sys.stdout.fileno())
    # Libraries print; the answer is alone on its descriptor.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        facts = importlib.import_module(module).probe(**json.load(sys.stdin))
        answer = {"facts": msgspec.to_builtins(facts, str_keys=True)}
    except Exception as error:
        # Whatever it is, its place is the report of who asked.
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(answers, "w") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main(sys.argv[1])
