"""A verdict, for tests of what is made of one; `dataclasses.replace` makes others of it."""

from chaosrun.verify.verdict import Verdict

PASSED = Verdict(
    status="PASS",
    exit_code=0,
    cause="bit-identical to the undisturbed run",
    hint=None,
    outcome="completed",
    checks=(),
    divergence=None,
    faults=(),
    attempts=(),
    steps=9,
    lost_steps=0,
)
