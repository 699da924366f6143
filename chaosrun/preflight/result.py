"""What a preflight came to: its findings, which nodes are good, and the exit code. Values only: no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaosrun.preflight.model import Facts, Finding, Level, Node, Status

EXIT_UNFIT = 8
ANSWERS = "answers"
"""What stands for the check that every node is asked by, where one does not answer."""
LEFT_OUT = "left out: "
"""How the reason of a SKIP begins whose node takes no part any more."""


def worst(statuses: Sequence[Status]) -> Status:
    """What several come to; SKIP when there are none."""
    return max(statuses, key=list(Status).index, default=Status.SKIP)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    """A check that was made, or why it was not."""

    name: str
    about: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    level: Level
    started_s: float
    """Seconds since the epoch."""
    seconds: float
    nodes: tuple[Node, ...]
    checks: tuple[CheckRun, ...]
    """In the order they were made."""
    findings: tuple[Finding, ...]
    facts: Mapping[str, Facts]
    """By check."""
    address: str | None = None
    """Of the cluster; None: a private Ray on this machine."""
    job: str | None = None
    """Path of the job file."""
    baseline: str | None = None
    """Path of the baseline that it was compared with."""
    strict: bool = False
    """Whether a WARN makes unfit."""
    arguments: tuple[str, ...] = ()
    """Job, overrides, root and address, as the command line has them: of `chaosrun submit` as well."""
    options: tuple[str, ...] = ()
    """With these, besides, `chaosrun preflight` looks at the same again: the level, and what the forecast is for."""
    choice: tuple[str, ...] = ()
    """--only and --skip, as they were given."""

    def bad(self) -> dict[str, tuple[Finding, ...]]:
        """Nodes that are left out of the good ones, and what speaks against each: a FAIL or an ERROR (under strict a WARN)."""
        against: dict[str | None, list[Finding]] = {}
        for finding in self.findings:
            if self._counts(finding):
                for name in {finding.node, *finding.blames} - {None}:
                    against.setdefault(name, []).append(finding)
        return {node.name: tuple(against[node.name]) for node in self.nodes if node.name in against}

    def good(self) -> tuple[str, ...]:
        """Names of the nodes that can be used: nothing speaks against them, and something was looked at there."""
        bad, looked_at = self.bad(), self._looked_at()
        return tuple(node.name for node in self.nodes if node.name not in bad and node.name in looked_at)

    def unchecked(self) -> tuple[str, ...]:
        """Names of the nodes that are neither good nor bad: whatever was to be looked at there was skipped. They do not make
        unfit: a head without CPUs trains nothing."""
        known = {*self.good(), *self.bad()}
        return tuple(node.name for node in self.nodes if node.name not in known)

    @property
    def fit(self) -> bool:
        """Nothing failed, every check that applies could run, and at least one thing was shown to be right."""
        return self._any_pass() and not any(self._counts(finding) for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return 0 if self.fit else EXIT_UNFIT

    def _counts(self, finding: Finding) -> bool:
        return finding.status in (Status.FAIL, Status.ERROR) or (self.strict and finding.status is Status.WARN)

    def _looked_at(self) -> set[str]:
        """Nodes on which something passed, or passed but for a warning."""
        if not self._any_pass():
            return set()
        found = [finding for finding in self.findings if finding.status in (Status.PASS, Status.WARN)]
        return {name for finding in found for name in (finding.node, *finding.covers) if name is not None}

    def _any_pass(self) -> bool:
        return any(finding.status is Status.PASS for finding in self.findings)
