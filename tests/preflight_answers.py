"""Nodes, jobs, and what nodes told as a check is given it: JSON values become the facts of the check's own type."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.preflight.model import Answers, Check, F, Finding, Level, Setting, read_answers
from chaosrun.records.codec import convert
from chaosrun.spec.job_file import Job
from chaosrun.spec.model import JobSpec

SETTING = Setting(level=Level.QUICK, root=Path("/r"), storage=Path("/r/s"))


def node_of(name: str = "n", *, cpus: float = 2.0, gpus: int = 0, head: bool = False) -> Node:
    return Node(name=name, node_id=name, address="127.0.0.1", hostname=name, cpus=cpus, gpus=gpus, head=head)


def nodes_of(*names: str) -> list[Node]:
    return [node_of(name, head=name == names[0]) for name in names]


def job_of(workers: int = 2, **parts: Any) -> Job:
    spec = JobSpec.model_validate({"name": "probe", "script": "train.py", "workers": workers, **parts})
    here = Path("/nowhere")
    return Job(spec=spec, path=here / "job.yaml", directory=here, script_path=here / "train.py", text="", tree=None)  # type: ignore[arg-type]


def told(
    facts: type[Any], answered: Mapping[str, Any], unanswered: Mapping[str, Any] | None = None, **more: Any
) -> Answers[Any]:
    silent = {name: ProbeOutcome(**{"ended": "died", **why}) for name, why in (unanswered or {}).items()}
    return Answers(
        answered={name: each if isinstance(each, facts) else convert(each, facts) for name, each in answered.items()},
        unanswered=silent,
        **more,
    )


def judged(
    check: Check[Any],
    setting: Setting,
    nodes: Sequence[Node],
    answered: Mapping[str, Any],
    unanswered: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Of a check that each node makes for itself."""
    return list(check.judge(setting, nodes, told(check.facts, answered, unanswered)))


class Answering:
    """A pool whose `probe` a test writes."""

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        raise AssertionError(calls)

    def ask(self, calls: Mapping[str, Call], facts: type[F]) -> Answers[F]:
        began_s = time.time()
        return read_answers(self.probe(calls), facts, (began_s, time.time()))
