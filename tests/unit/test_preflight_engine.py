"""The order of a preflight, who is left out, and what it comes to: with a simulated pool."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import chaosrun.preflight
from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.errors import UsageError
from chaosrun.preflight.conduct import choose, expect_good_nodes, write_good_nodes
from chaosrun.preflight.engine import Engine
from chaosrun.preflight.model import Answers, Check, Finding, Level, Measure, Pool, Setting, Status, worst
from chaosrun.preflight.peers import Baseline
from chaosrun.preflight.result import Result

PASS, WARN, FAIL, SKIP, ERROR = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.ERROR
Answer = Callable[[str, Call], ProbeOutcome]


def node(name: str) -> Node:
    return Node(name=name, node_id=name, address="10.0.0.1", hostname=name, cpus=2.0, gpus=0)


@dataclass
class SimulatedPool:
    """Answers at once, nodes in turn, each with what `answer` says; "lost" loses the node."""

    names: Sequence[str]
    answer: Answer = lambda name, call: ProbeOutcome(facts={"node": name})
    lost: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    dies: str = ""
    """Who is gone when the roll is called next."""

    @property
    def everyone(self) -> Sequence[Node]:
        return [node(name) for name in self.names]

    @property
    def nodes(self) -> Sequence[Node]:
        return [each for each in self.everyone if each.name not in self.lost]

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        found: dict[str, ProbeOutcome] = {}
        for name, call in calls.items():
            self.asked.append((name, call.probe))
            found[name] = self.answer(name, call)
            if found[name].ended == "lost":
                self.lost[name] = found[name].error
        return found

    def check_agents(self) -> None:
        if self.dies:
            self.lost.setdefault(self.dies, "gone")


def by_itself(name: str, bad: Mapping[str, Status] | None = None, *, level: Level = Level.QUICK) -> Check:
    """Each node passes, but for those of which `bad` says otherwise."""

    def judge(setting: Setting, nodes: Sequence[Node], facts: Answers[Any]) -> Sequence[Finding]:
        return [_finding(name, (bad or {}).get(each, PASS), each) for each in facts.answered]

    return Check(
        name=name, about=f"about {name}", order=1, level=level, judge=judge, call=lambda s, n: Call(probe=name, limit_s=1.0)
    )


def together(name: str, *findings: Finding, gather: Callable[[Setting, Pool], Any] | None = None) -> Check:
    def ask_all(setting: Setting, pool: Pool) -> Any:
        return {"asked": [each.name for each in pool.nodes], "earlier": sorted(setting.earlier)}

    def judge(setting: Setting, nodes: Sequence[Node], facts: Any) -> Sequence[Finding]:
        return findings or [_finding(name, PASS, None)]

    return Check(name=name, about=f"about {name}", order=1, level=Level.STANDARD, judge=judge, gather=gather or ask_all)


def _finding(check: str, status: Status, name: str | None, **more: Any) -> Finding:
    said = {"measured": "1", "threshold": "2", "remedy": "mend it", "reason": "because"}
    return Finding(check=check, name="a thing", status=status, node=name, **({**said, **more}))


def fly(
    pool: SimulatedPool, *checks: Check, baseline: Result | None = None, events: list[Mapping[str, Any]] | None = None
) -> Result:
    setting = Setting(level=Level.STANDARD, root=Path("/r"), storage=Path("/s"))
    on_event = (lambda event: None) if events is None else events.append
    earlier = None if baseline is None else Baseline(baseline)
    return Engine(setting=setting, pool=pool, checks=checks, on_event=on_event, baseline=earlier).run(0.0)


def rows(result: Result) -> list[tuple[str, str | None, Status]]:
    return [(finding.check, finding.node, finding.status) for finding in result.findings]


def test_all_is_well() -> None:
    pool = SimulatedPool(("a", "b"))
    result = fly(pool, together("first"), by_itself("one"), by_itself("two"), together("last"))
    assert rows(result) == [
        ("first", None, PASS),
        *[(check, name, PASS) for check in ("one", "two") for name in "ab"],
        ("last", None, PASS),
    ]
    assert (result.good, result.bad(), result.exit_code) == (("a", "b"), {}, 0)
    assert [run.name for run in result.checks] == ["first", "one", "two", "last"]
    assert result.facts["last"]["earlier"] == ["first", "one", "two"]
    assert result.facts["one"].answered == {"a": {"node": "a"}, "b": {"node": "b"}}


def test_a_bad_node_is_left_out_of_what_several_do() -> None:
    pool = SimulatedPool(("a", "b", "c"))
    result = fly(pool, by_itself("one", {"b": FAIL}), by_itself("two"), together("last"))
    # What each does for itself it goes on with: there may be more to mend.
    assert ("b", "two") in pool.asked
    assert result.facts["last"]["asked"] == ["a", "c"]
    left_out = [finding for finding in result.findings if finding.status is SKIP]
    assert [(finding.node, finding.check) for finding in left_out] == [("b", "last")]
    assert left_out[0].reason == "left out: FAIL of one: a thing"
    assert (result.good, list(result.bad()), result.exit_code) == (("a", "c"), ["b"], 8)


def test_a_warning_leaves_nobody_out() -> None:
    result = fly(SimulatedPool(("a", "b")), by_itself("one", {"b": WARN}), together("last"))
    assert result.facts["last"]["asked"] == ["a", "b"] and result.exit_code == 0
    strict = replace(result, strict=True)
    assert (strict.good, strict.exit_code) == (("a",), 8)


def test_a_blamed_node_is_left_out() -> None:
    blaming = together("first", _finding("first", FAIL, None, blames=("c", "unknown")))
    result = fly(SimulatedPool(("a", "b", "c")), blaming, together("last"))
    assert result.facts["last"]["asked"] == ["a", "b"] and list(result.bad()) == ["c"]


@pytest.mark.parametrize("ended", ["limit", "died", "raised"])
def test_no_answer_is_an_error_of_that_node(ended: Any) -> None:
    pool = SimulatedPool(
        ("a", "b"), lambda name, call: ProbeOutcome(ended=ended, error="why") if name == "b" else ProbeOutcome(facts={})
    )
    result = fly(pool, by_itself("one"), by_itself("two"))
    assert rows(result) == [("one", "a", PASS), ("one", "b", ERROR), ("two", "a", PASS), ("two", "b", ERROR)]
    assert result.findings[1].reason == "why" and result.good == ("a",) and result.exit_code == 8
    assert result.facts["one"].unanswered == {"b": ProbeOutcome(ended=ended, error="why")}


def test_what_an_assessment_says_of_no_answer_counts() -> None:
    pool = SimulatedPool(("a",), lambda name, call: ProbeOutcome(ended="limit", error="why"))
    check = by_itself("one")
    hangs = replace(check, judge=lambda setting, nodes, facts: [_finding("one", FAIL, each) for each in facts.unanswered])
    assert rows(fly(pool, hangs)) == [("one", "a", FAIL)]


def test_a_node_that_is_lost_is_asked_no_more() -> None:
    def answer(name: str, call: Call) -> ProbeOutcome:
        return ProbeOutcome(ended="lost", error="gone") if (name, call.probe) == ("b", "one") else ProbeOutcome(facts={})

    pool = SimulatedPool(("a", "b", "c"), answer)
    events: list[Mapping[str, Any]] = []
    result = fly(pool, by_itself("one"), by_itself("two"), together("last"), events=events)
    of_b = [(finding.check, finding.status, finding.reason) for finding in result.findings if finding.node == "b"]
    left_out = "left out: ERROR of one: about one"
    assert of_b == [("one", ERROR, "gone"), ("two", SKIP, left_out), ("last", SKIP, left_out)]
    assert result.facts["last"]["asked"] == ["a", "c"] and result.good == ("a", "c")
    told = [(event["event"], event["check"]) for event in events]
    began_and_ended = [(event, check) for check in ("one", "two", "last") for event in ("check.began", "check.ended")]
    assert told == [*began_and_ended[:2], ("node.out", "one"), *began_and_ended[2:]]


def test_a_node_that_never_answered() -> None:
    pool = SimulatedPool(("a", "b"), lost={"a": "no answer"})
    result = fly(pool, by_itself("one"))
    assert rows(result) == [("answers", "a", ERROR), ("one", "a", SKIP), ("one", "b", PASS)]
    assert result.checks[0].name == "answers" and result.good == ("b",) and result.exit_code == 8


def test_nobody_answers() -> None:
    result = fly(SimulatedPool(("a",), lost={"a": "no answer"}), by_itself("one"), together("last"))
    assert rows(result) == [
        ("answers", "a", ERROR),
        *[(check, name, SKIP) for check in ("one", "last") for name in (None, "a")],
    ]
    assert result.good == () and result.exit_code == 8


def test_what_breaks_is_an_error_and_the_rest_goes_on() -> None:
    def break_down(*whatever: Any) -> Any:
        raise ValueError("no idea")

    broken = together("two", gather=break_down), replace(together("three"), judge=break_down)
    result = fly(SimulatedPool(("a", "b")), by_itself("one"), *broken, together("four"))
    assert rows(result)[2:] == [("two", None, ERROR), ("three", None, ERROR), ("four", None, PASS)]
    made, judged = result.findings[2:4]
    assert made.reason == "chaosrun could not make this check: ValueError: no idea"
    assert judged.reason == "chaosrun could not judge what was found: ValueError: no idea"
    assert made.remedy == "try again with --only two; if it comes again, report it with the file of -o json"
    # Nothing is known of those that took part.
    assert made.blames == judged.blames == ("a", "b") and result.good == () and result.exit_code == 8
    assert result.facts["four"]["asked"] == ["a", "b"] and "two" not in result.facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    speed: float


def test_facts_that_cannot_be_read_do_not_keep_the_others_from_being_judged() -> None:
    def answer(name: str, call: Call) -> ProbeOutcome:
        return ProbeOutcome(facts={} if name == "a" else {"speed": 1.0 if name == "b" else 9.0})

    def judge(setting: Setting, nodes: Sequence[Node], told: Answers[Speed]) -> Sequence[Finding]:
        fastest = max(facts.speed for facts in told.answered.values())
        return [_finding("one", PASS if facts.speed == fastest else FAIL, name) for name, facts in told.answered.items()]

    result = fly(SimulatedPool(("a", "b", "c"), answer), replace(by_itself("one"), judge=judge, facts=Speed))
    # b is judged beside c still.
    assert rows(result) == [("one", "a", ERROR), ("one", "b", FAIL), ("one", "c", PASS)]
    assert result.findings[0].reason == "its answer cannot be read: Object missing required field `speed`"
    assert result.good == ("c",)


@pytest.mark.parametrize("noticed", ["asked", "roll"])
def test_a_node_that_dies_while_several_do_something(noticed: str) -> None:
    pool = SimulatedPool(("a", "b"))

    def gather(setting: Setting, asking: Pool) -> Any:
        if noticed == "asked":
            pool.lost["b"] = "gone"
        else:
            pool.dies = "b"
        return {}

    skipping = together("one", _finding("one", PASS, "a"), _finding("one", SKIP, "b"), gather=gather)
    result = fly(pool, skipping, together("last"))
    of_one = [("one", "a", PASS), ("one", "b", SKIP), ("one", "b", ERROR)]
    assert rows(result) == [*of_one, ("last", None, PASS), ("last", "b", SKIP)]
    assert result.findings[2].reason == "gone" and result.findings[2].remedy
    assert result.facts["last"]["asked"] == ["a"] and (result.good, result.exit_code) == (("a",), 8)


def test_a_node_that_dies_and_is_told_of_once() -> None:
    failing = together("one", _finding("one", FAIL, "b"), _finding("one", PASS, "a"))
    assert [row for row in rows(fly(SimulatedPool(("a", "b"), dies="b"), failing)) if row[1] == "b"] == [("one", "b", FAIL)]


def test_a_node_that_dies_after_its_last_answer() -> None:
    result = fly(SimulatedPool(("a", "b"), dies="b"), by_itself("one"))
    assert rows(result) == [("one", "a", PASS), ("one", "b", PASS), ("answers", "b", ERROR)]
    assert [run.name for run in result.checks] == ["one", "answers"] and result.good == ("a",)


def test_a_node_on_which_everything_was_skipped_is_not_good() -> None:
    drill = together("drill", *(_finding("drill", status, name) for name, status in (("a", PASS), ("b", SKIP), ("c", WARN))))
    result = fly(SimulatedPool(("a", "b", "c")), drill)
    # c was looked at, and can be used; b does not make unfit.
    assert (result.good, result.unchecked, list(result.bad()), result.exit_code) == (("a", "c"), ("b",), [], 0)


def test_what_passes_for_the_whole_cluster_covers_those_that_answered() -> None:
    def ask_one(setting: Setting, pool: Pool) -> Any:
        pool.ask({"a": Call(probe="x", limit_s=1.0)}, dict)
        return {}

    pool = SimulatedPool(("a", "b"))
    assert fly(pool, together("one", gather=ask_one)).good == ("a",)
    named = fly(pool, together("one", _finding("one", PASS, None, covers=("b",)), gather=ask_one))
    assert named.good == ("b",)
    # A forecast asks nobody.
    assert fly(pool, together("one", gather=lambda setting, pool: {})).good == ()


def test_an_interrupt_goes_through() -> None:
    def interrupted(setting: Setting, pool: Pool) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fly(SimulatedPool(("a",)), together("one", gather=interrupted))


def test_nothing_checked_is_not_fit() -> None:
    skipping = together("one", _finding("one", SKIP, None))
    result = fly(SimulatedPool(("a", "b")), skipping)
    assert result.exit_code == 8 and result.good == ()
    assert fly(SimulatedPool(()), by_itself("one")).exit_code == 8


def test_rows_of_a_check_are_in_the_order_of_nodes() -> None:
    shuffled = [_finding("one", PASS, name) for name in ("c", "a", "b", "a")] + [_finding("one", PASS, None)]
    result = fly(SimulatedPool(("a", "b", "c")), together("one", *shuffled))
    assert [finding.node for finding in result.findings] == [None, "a", "a", "b", "c"]


def test_peers_and_a_baseline_are_compared_and_leave_out() -> None:
    def measured(numbers: Sequence[float]) -> Check:
        measures = [Measure(number=number, unit="s", better="lower", fail=0.25) for number in numbers]
        return together("one", *(_finding("one", PASS, name, measure=each) for name, each in zip("abc", measures, strict=True)))

    pool = SimulatedPool(("a", "b", "c"))
    result = fly(pool, measured([1, 1, 9]), together("last"))
    assert list(result.bad()) == ["c"] and result.facts["last"]["asked"] == ["a", "b"]
    slower = fly(pool, measured([9, 9, 9]), baseline=result)
    assert list(slower.bad()) == ["a", "b"]
    assert rows(slower)[-1] == ("baseline", None, PASS) and slower.checks[-1].name == "baseline"
    of_another = fly(pool, by_itself("two"), baseline=fly(SimulatedPool(("z",)), by_itself("two")))
    assert rows(of_another)[-1] == ("baseline", None, SKIP)


def test_what_several_come_to() -> None:
    pairs = ([], [SKIP, PASS], [WARN, PASS], [ERROR, WARN], [ERROR, FAIL])
    assert [worst(pair) for pair in pairs] == [SKIP, PASS, WARN, ERROR, FAIL]


CHECKS = (by_itself("host"), together("network"), by_itself("disk", level=Level.DEEP), together("shared storage"))


@pytest.mark.parametrize(
    ("level", "only", "skip", "names"),
    [
        (Level.QUICK, [], [], ["host"]),
        (Level.STANDARD, [], [], ["host", "network", "shared storage"]),
        (Level.DEEP, [], ["host"], ["network", "disk", "shared storage"]),
        (Level.QUICK, ["disk", "host"], [], ["host", "disk"]),
        (Level.QUICK, ["disk", "host"], ["host"], ["disk"]),
    ],
)
def test_choice(level: Level, only: list[str], skip: list[str], names: list[str]) -> None:
    assert [check.name for check in choose(CHECKS, level, only=only, skip=skip)] == names


@pytest.mark.parametrize(
    ("only", "skip", "message", "hint"),
    [
        (["hots"], [], "--only hots: there is no such check", "did you mean 'host'?"),
        ([], ["shared-storage"], "--skip shared-storage: there is no such check", "did you mean 'shared storage'?"),
        (["zzz"], [], "--only zzz: there is no such check", "there are host, network, disk, shared storage"),
        (["host"], ["host"], "no check is left to make", "there are host, network, disk, shared storage"),
    ],
)
def test_a_choice_that_is_none(only: list[str], skip: list[str], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        choose(CHECKS, Level.QUICK, only=only, skip=skip)
    assert (raised.value.message, raised.value.hint) == (message, hint)


def test_the_list_of_good_nodes(tmp_path: Path) -> None:
    path = tmp_path / "good"
    path.write_text("of yesterday\n")
    expect_good_nodes(path)
    assert not path.exists()
    write_good_nodes(path, fly(SimulatedPool(("a", "b", "c")), by_itself("one", {"b": FAIL})))
    assert path.read_text() == "a\nc\n"
    write_good_nodes(path, fly(SimulatedPool(("a",)), by_itself("one", {"a": ERROR})))
    assert path.read_text() == "" and [entry.name for entry in tmp_path.iterdir()] == ["good"]
    for wrong in (tmp_path / "no" / "such", tmp_path):
        with pytest.raises(UsageError, match=r"cannot be written|there is no directory"):
            expect_good_nodes(wrong)


ASKED = r"""(?:\{PROBES\}\.|\bask\(\s*")(\w+)"""


def test_every_probe_that_a_check_asks_for_exists() -> None:
    folder = Path(chaosrun.preflight.__file__).parent
    asked = {name for path in (folder / "checks").glob("*.py") for name in re.findall(ASKED, path.read_text())}
    assert len(asked) > 5 and asked <= {path.stem for path in (folder / "probes").glob("*.py")}
