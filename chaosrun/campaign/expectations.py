"""A suite's expectations of a drill: refused at the start if no verdict can meet them, compared with the verdict at the end."""

import re
from collections.abc import Iterable, Iterator
from typing import get_args

from chaosrun.spec.places import Problem, spec_error
from chaosrun.spec.suite import Expectation, SuiteDrill
from chaosrun.spec.tree import find
from chaosrun.spec.validation import nearest
from chaosrun.verify.codes import public_codes
from chaosrun.verify.compare import Kind, exact_weights
from chaosrun.verify.ruling import EXIT_CODES, OUTCOME_EXIT_CODES, PASS_CODES
from chaosrun.verify.verdict import Verdict
from chaosrun.wording import listed

LIKE_A_CODE = re.compile(r"[a-z]+(_[a-z]+)+")
KINDS: tuple[str, ...] = get_args(Kind)


def expect_possible(drills: Iterable[SuiteDrill]) -> None:
    """Raises SpecError naming every expectation that cannot be met."""
    if problems := [problem for drill in drills for problem in _problems(drill)]:
        raise spec_error(problems)


def surprises(expected: Expectation, verdict: Verdict) -> Iterator[str]:
    """One sentence for each way in which the verdict is not the expected one."""
    if verdict.status != expected.verdict:
        yield f"{verdict.status} where {expected.verdict} was expected: {verdict.cause}"
        return
    if verdict.code == "settled_too_early" and expected.cause is None:
        yield f"the control of the early verdict disagrees with it: {verdict.cause}"
    kind = verdict.divergence.kind if verdict.divergence else None
    if expected.kind is not None and kind != expected.kind:
        yield f"{kind or 'nothing'} differed first, expected was {expected.kind}"
    if expected.cause is not None and not verdict.says(expected.cause):
        yield f"the cause is not {expected.cause!r}: {verdict.cause} ({verdict.code})"
    if expected.exit_code is not None and verdict.exit_code != expected.exit_code:
        yield f"exit code {verdict.exit_code}, expected was {expected.exit_code}"


def _problems(drill: SuiteDrill) -> Iterator[Problem]:
    expected, verify = drill.expect, drill.job.spec.verify
    verdict, kind, cause = expected.verdict, expected.kind, expected.cause

    def problem(key: str, message: str, hint: str) -> Problem:
        return Problem(place=find(drill.said, (key,))[1].place, message=message, hint=hint)

    if kind is not None and kind not in KINDS:
        close = nearest(kind, KINDS)
        hint = f"did you mean {close!r}?" if close else f"there are {', '.join(KINDS)}"
        yield problem("kind", f"no kind {kind!r}", hint=hint)
    elif kind is not None and verdict == "PASS" and verify.losses.exact and exact_weights(verify):
        yield problem("kind", "nothing differs in a PASS", hint="leave out kind, or expect FAIL")
    if cause is not None and LIKE_A_CODE.fullmatch(cause):
        codes = public_codes()
        if cause not in codes:
            close = nearest(cause, codes)
            guess = f"did you mean {close}?" if close else "see docs/causes.md"
            yield problem("cause", f"no cause has the code {cause}", hint=f"{guess} (a word with _ alone is taken for a code)")
        elif verdict == "PASS" and cause not in PASS_CODES:
            yield problem("cause", f"{cause} is no cause of a PASS", hint=f"those are {listed(sorted(PASS_CODES))}")
    possible = {EXIT_CODES[verdict], *(OUTCOME_EXIT_CODES.values() if verdict == "INCONCLUSIVE" else ())}
    if expected.exit_code is not None and expected.exit_code not in possible:
        codes_of_it = " or ".join(map(str, sorted(possible)))
        yield problem("exit_code", f"{verdict} never has exit code {expected.exit_code}", hint=f"it has {codes_of_it}")
