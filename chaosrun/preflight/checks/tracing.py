"""The check "tracing": may processes be traced on a node, as kills inside a script's own save require? Probe and judge in one
file: the node's part is `probe`, the only function with effects, which imports what it needs itself."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.model import Answers, Check, Finding, Level, Rows, Setting, ask

LIMIT_S = 15.0


class TracingFacts(Struct, frozen=True, kw_only=True):
    refused: str = ""
    """Why processes cannot be traced; empty: they can."""
    remedy: str = ""


def call(setting: Setting, node: Node) -> Call:
    return ask(__name__, LIMIT_S)


def probe() -> TracingFacts:
    from chaosrun.errors import ResourcesError
    from chaosrun.faults.strace import expect_strace

    try:
        expect_strace()
    except ResourcesError as error:
        return TracingFacts(refused=error.message, remedy=error.hint or "")
    return TracingFacts()


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[TracingFacts]) -> Iterator[Finding]:
    """No warning for a job with chaosrun's own checkpoints, which does not need tracing."""
    own_saves = setting.job is not None and setting.job.spec.by == "script"
    for name, facts in told.answered.items():
        row = Rows(check="tracing", name="strace", node=name)
        if not facts.refused:
            yield row.passed("processes can be traced")
        elif own_saves:
            yield row.warn(facts.refused, "the script's own saves can be struck", facts.remedy)
        else:
            yield row.skip(facts.refused)


CHECK = Check(
    name="tracing",
    about="kills inside a script's own save",
    order=65,
    level=Level.STANDARD,
    call=call,
    facts=TracingFacts,
    judge=judge,
)
