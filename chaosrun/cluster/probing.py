"""Values of probing (nodes, calls and their outcomes), and the process that runs a probe. No Ray.

`python -m chaosrun.cluster.probing MODULE` takes parameters on stdin and gives facts on stdout, both JSON; what the probe
itself prints goes to stderr. An answer is {"facts": …} or {"error": …}; a process that gives none has died.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

EXPLAINED = {"use_attribute_docstrings": True, "extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic reads and explains a value that is part of a result's JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster."""

    __pydantic_config__ = EXPLAINED
    name: str
    """its name in all output; unique in the cluster"""
    node_id: str
    """Ray's"""
    address: str
    """IP address"""
    hostname: str
    """as the node itself reports"""
    cpus: float
    """as Ray counts them"""
    gpus: int
    """as Ray counts them"""
    ports: Mapping[str, int] = field(default_factory=dict)
    """the ports on which Ray listens there for other nodes, by purpose"""
    head: bool = False
    """whether Ray's head runs there"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A probe to be run in a separate process: the function `probe(**parameters)` of the module `probe`, which returns a struct
    of facts."""

    probe: str
    """The module's dotted name."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    limit_s: float
    """After this its process and everything below it are killed."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the process's environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """The result of a call: `facts`, or why there are none."""

    facts: Mapping[str, Any] | None = None
    """JSON values, as the probe's process wrote them."""
    error: str = ""
    """In one line, for people: it raised, was killed, could not be started, the agent or its node is gone."""
    ended: Literal["done", "raised", "limit", "late", "died", "lost"] = "done"
    """limit: killed after `limit_s`; late: the time for all calls was over before that; died: its process ended without
    an answer; lost: its agent or node is gone."""


def main(module: str) -> None:
    answers = os.dup(sys.stdout.fileno())
    # Libraries may print; the answer has its own descriptor.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        facts = importlib.import_module(module).probe(**json.load(sys.stdin))
        answer = {"facts": msgspec.to_builtins(facts, str_keys=True)}
    except Exception as error:
        # Any error goes into the caller's report.
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(answers, "w") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main(sys.argv[1])
