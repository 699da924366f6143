"""Checks of a verdict's premises: complete records, a reference without faults, the same environment in both legs. Pure. If one
fails, the drill is inconclusive: neither success nor failure can be attributed to recovery.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import permutations

from chaosrun.records.codec import to_plain
from chaosrun.records.events import TRAINED, FaultObserved, FaultRequested
from chaosrun.records.history import Attempt, LegHistory, changed_settings
from chaosrun.records.inputs import read_inputs, was_edited
from chaosrun.records.opened import OpenedFile, of_a_training
from chaosrun.records.position import Position
from chaosrun.verify.check import CheckResult, Drill, failed, inconclusive, passed, records_damaged, skipped, unproven
from chaosrun.verify.code_checks import irreproducible
from chaosrun.verify.codes import Cause, Params
from chaosrun.verify.compare import FIELDS, KINDS, Kind, differing_keys, unlike_orders
from chaosrun.verify.corruption import injections
from chaosrun.verify.restored import saved_difference
from chaosrun.wording import rank_list


def records(drill: Drill) -> CheckResult:
    """Both legs' files can be read in full and do not contradict each other."""
    legs = (drill.reference, drill.chaos)
    problems = [f"{leg.name}: {problem}" for leg in legs for problem in leg.problems]
    if all(leg.outcome == "completed" for leg in legs) and any(leg.layout.left.exists() for leg in legs):
        problems += [f"{leg.name}: left.json is missing" for leg in legs if not leg.layout.left.exists()]
    if damaged := records_damaged(problems):
        return damaged
    traces = sum(len(attempt.traces) for leg in legs for attempt in leg.attempts)
    return passed(f"{traces} traces and 2 journals read in full", traces=traces)


def completed(drill: Drill) -> CheckResult:
    """Both legs ran to the same end, on every rank."""
    for leg in (drill.reference, drill.chaos):
        if leg is drill.chaos and leg.finished and leg.outcome == "inexact_restore":
            return failed("inexact_restore", leg=leg.name, message=leg.finished.message)
        if lacking := not_ended(leg, drill, TRAINED if leg is drill.chaos else ("completed",)):
            return lacking
    expected = {drill.reference.ends[rank].step for rank in drill.ranks}
    if len(expected) != 1 or 0 in expected:
        return inconclusive("reference_ends_differ", steps=sorted(expected))
    step = expected.pop()
    seen = {rank: drill.chaos.ends[rank].step for rank in drill.ranks}
    other = [rank for rank in drill.ranks if seen[rank] != step]
    if other:
        about = {"leg": drill.chaos.name, "rank": other[0], "step": seen[other[0]], "expected": step}
        # The script ended for good when it was told to leave.
        taken = any((record.found or {}).get("problem_code") == "notice_taken" for record in drill.chaos.events(FaultObserved))
        return failed("ended_on_notice" if taken else "ended_at_another_step", **about, seen=list(seen.values()))
    if drill.ended_early is not None:
        return passed(
            f"the reference ended at step {drill.whole}; the chaos leg was ended at step {step} on every rank", step=step
        )
    return passed(f"both legs ended at step {step} on every rank", step=step)


def not_ended(leg: LegHistory, drill: Drill, outcomes: Sequence[str]) -> CheckResult | None:
    """Why the leg did not end; None if it reached one of these ends on every rank."""
    if leg.finished is None:
        return inconclusive("leg_unfinished", leg=leg.name)
    if leg.outcome == "diverged" and leg.outcome not in outcomes:
        return inconclusive("stopped_at_alarm")
    if leg.outcome not in outcomes:
        return inconclusive("leg_not_completed", leg=leg.name, outcome=leg.outcome, message=leg.finished.message)
    missing = [rank for rank in drill.ranks if rank not in leg.ends]
    return inconclusive("end_not_recorded", leg=leg.name, who=rank_list(missing), ranks=missing) if missing else None


def reference(drill: Drill) -> CheckResult:
    """The reference leg is valid: one attempt, no fault, every step of every rank recorded once."""
    leg, chain = drill.reference, drill.reference_lineage
    faults = [record.fault for record in leg.events(FaultRequested)]
    if faults:
        return inconclusive("fault_in_reference", faults=faults)
    if not chain.final_step:
        return inconclusive("reference_empty")
    ends = {end.step for end in leg.ends.values()}
    if len(ends) > 1:
        return inconclusive("reference_ends_differ", steps=sorted(ends))
    last = leg.attempts[-1]
    earlier = any(trace.steps for attempt in leg.attempts[:-1] for trace in attempt.traces.values())
    if earlier or last.resume is not None or any(start.restored for start in last.starts.values()):
        deaths = [death for each in leg.attempts for death in each.unplanned]
        if first := next((death for death in deaths if death.error and death.error.by_script), None):
            return inconclusive("reference_raised", attempt=first.attempt, reason=first.reason)
        if deaths:
            return inconclusive("reference_interrupted", because="died", attempts=len(leg.attempts), reason=deaths[0].reason)
        return inconclusive("reference_interrupted", attempts=len(leg.attempts))
    problem = _not_from_the_beginning(last, drill) or _reference_gap(drill)
    if problem:
        return inconclusive("reference_unreliable", problem=problem)
    return passed(f"{chain.final_step} steps on {len(drill.ranks)} ranks, in one attempt, no fault, no restore")


def _not_from_the_beginning(attempt: Attempt, drill: Drill) -> str | None:
    for rank, start in attempt.starts.items():
        if start.world_size != drill.spec.workers:
            return f"rank {rank} saw a world of {start.world_size}, the job has {drill.spec.workers} workers"
        if start.position != Position():
            return f"rank {rank} began at {start.position}"
    return None


def _reference_gap(drill: Drill) -> str | None:
    """Why the reference does not hold each step of each rank exactly once; None if it does."""
    chain = drill.reference_lineage
    if sorted(chain.steps) != list(drill.ranks):
        return f"it has traces of ranks {sorted(chain.steps)}, the job has {drill.spec.workers} workers"
    if chain.repeated:
        return f"step {chain.repeated[0].step} of rank {chain.repeated[0].rank} was recorded twice"
    for rank in drill.ranks:
        missing = chain.missing(rank, chain.final_step)
        if missing:
            return f"rank {rank} lacks step {missing[0]}"
    return None


def environment(drill: Drill) -> CheckResult:
    """Both legs ran in the same environment, and all processes compute the same bits (hazards K1, K2, K7)."""
    expected, seen = (_comparable(leg.environment, drill) for leg in (drill.reference, drill.chaos))
    if not expected or not seen:
        without = [leg.name for leg in (drill.reference, drill.chaos) if not leg.environment]
        return inconclusive("environment_not_recorded", which=" and ".join(without), legs=without)
    keys = differing_keys(expected, seen)
    if keys:
        differences = {key: {"reference": expected.get(key), "chaos": seen.get(key)} for key in keys}
        first = f"{keys[0]} was {expected.get(keys[0])!r}, then {seen.get(keys[0])!r}"
        return inconclusive("environment_differs", first=first, differences=differences)
    heard = list(canaries(drill.reference, drill.chaos, restarts=not changed_settings(drill.reference.environment)))
    if differ := bits_differ(heard):
        return differ
    summary = f"{len(expected)} facts equal in both legs"
    if heard:
        summary += f", {len(heard)} processes compute the same bits"
    return passed(summary, facts=len(expected), canaries=len(heard))


def _comparable(environment: Mapping[str, object] | None, drill: Drill) -> Mapping[str, object] | None:
    """The environment without facts that may differ between legs: the libraries that the script uses (known only as far as it
    had imported them), settings that a restart changes, and those that the script itself changes while it trains."""
    left_out = {
        "libraries",
        "changed",
        *changed_settings(drill.reference.environment),
        *(("python_hash_seed", "hash_order") if drill.by_script else ()),
    }
    return environment and {key: value for key, value in environment.items() if key not in left_out}


def canaries(*legs: LegHistory, restarts: bool = True) -> Iterator[tuple[str, str]]:
    """For each process, its name and the digest of its results from the same numbers. `restarts`: of restarted ones, too."""
    for leg in legs:
        for trace in leg.traces:
            if trace.start and trace.start.canary is not None and (restarts or trace.attempt == 1):
                yield f"rank {trace.rank} of {leg.name} attempt {trace.attempt}", trace.start.canary


def bits_differ(heard: Sequence[tuple[str, str]]) -> CheckResult | None:
    """How the results of processes differ; None if they are equal. `heard`: as `canaries` returns."""
    for where, value in heard[1:]:
        if value != heard[0][1]:
            return inconclusive("bits_differ", where=where, first=heard[0][0], canaries=dict(heard))
    return None


def own_files(drill: Drill) -> CheckResult:
    """The job's sources were the same all the time, and none read files that another leg's training had left: results
    based on them would say nothing about checkpoints."""
    if changed := _changed_sources(drill):
        leg, name = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        return inconclusive("source_changed", leg=leg, file=name, more=more, files=[name for _, name in changed])
    found = [(leg, opened) for leg, files in drill.opened() for opened in of_a_training(files)]
    if not found:
        return passed("no leg read a file that another leg had left")
    return inconclusive("file_of_another_leg", **_about_files(found))


def _changed_sources(drill: Drill) -> list[tuple[str, str]]:
    """The job's own files of which the legs ran several versions, each with the first leg that ran another one than before."""
    ran = read_inputs(drill.reference.layout.inputs) or {}
    legs = [leg for leg in (drill.reference, drill.chaos, drill.confirming) if leg]
    found = ((leg.name, name, digest) for leg in legs for name, digest in (read_inputs(leg.layout.inputs) or {}).items())
    first: dict[str, str] = {}
    for leg, name, digest in found:
        if was_edited(digest) or digest != ran.get(name, digest):
            first.setdefault(name, leg)
    return [(leg, name) for name, leg in first.items()]


def edited_sources(leg: LegHistory) -> list[str]:
    """The job's own files of which this leg ran several versions."""
    return [name for name, digest in (read_inputs(leg.layout.inputs) or {}).items() if was_edited(digest)]


def file_that_differs(drill: Drill) -> Cause | None:
    """A likely reason why legs without faults differ: a file of another leg that one of them read, whenever it was written."""
    found = [(leg, opened) for leg, files in drill.opened() for opened in files]
    return Cause.of("file_of_another_leg", **_about_files(found)) if found else None


def _about_files(found: Sequence[tuple[str, OpenedFile]]) -> Params:
    leg, first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    everything = [{"leg": leg, **to_plain(opened)} for leg, opened in found]
    return {"leg": leg, "file": first.path, "left_by": first.left_by, "more": more, "opened": everything}


def reproducible(drill: Drill) -> CheckResult:
    """The job is reproducible: the first attempt equals the reference, except in what a corruption may have changed."""
    if not drill.chaos.attempts:
        return inconclusive("no_attempt")
    first = drill.chaos.attempts[0]
    if drill.began:
        return _repeated_before(drill)
    if first.resume is not None or any(start.restored for start in first.starts.values()):
        return inconclusive("first_attempt_restored", why=unproven(drill.reference, drill.chaos, drill.spec) or "")
    fault_free = [start for attempt in drill.reference.attempts for start in attempt.starts.values()]
    if message := unlike_orders([*fault_free, *first.starts.values()]):
        return inconclusive("parameter_order", message=f"{message}, before the first fault")
    for kind, where, expected, seen in _starts(drill, first):
        if expected != seen:
            how = f"before the first step, {where} already differs from the reference"
            return inconclusive("job_not_repeatable", because=irreproducible(kind), how=how, expected=expected, seen=seen)
    damage = next((injection for injection in injections(drill) if injection.attempt == first.number), None)
    compared = _in_both(drill, first, drill.reference_lineage.final_step if damage is None else damage.clean_step)
    for expected_step, step in drill.pairs_apart(first):
        damaged = [field for field in FIELDS if damage and damage.may_show(first.number, step.step, field)]
        if found := drill.mismatch(expected_step, step, (field for field in drill.fields if field not in damaged)):
            how = f"{found.field} differs at {found.place}, before the first fault"
            return inconclusive("job_not_repeatable", because=irreproducible(KINDS[found.field]), how=how, first=asdict(found))
    for step in sorted({saved.step for trace in first.traces.values() for saved in trace.checkpoints}):
        if damage and damage.may_show(first.number, step, None):
            continue
        if difference := saved_difference(drill, first, step):
            where = f"the {difference.component} state saved at step {step} on rank {difference.rank} ({difference.names[0]})"
            how = f"before the first fault, {where} already differs from the reference"
            about = {"how": how, "step": step, "ranks": list(difference.ranks)}
            saves = (saved for trace in first.traces.values() for saved in trace.checkpoints if saved.step == step)
            if difference.component == "registered" and (saved := next((each for each in saves if each.by_itself), None)):
                return inconclusive("job_not_repeatable", because="by_itself", name=saved.changed["registered"], **about)
            return inconclusive("job_not_repeatable", **about)
    if how := _alone(drill):
        return inconclusive("job_not_repeatable", because="restored_twice", how=how)
    if not compared:
        return skipped("no step was recorded before the first fault", steps=0)
    why = f"; from the beginning: {drill.chaos.began.why}" if drill.chaos.began else ""
    return passed(f"{compared} step records before the first fault equal the reference{why}", records=compared)


def _repeated_before(drill: Drill) -> CheckResult:
    """The check for a leg that began at a checkpoint of the reference: the steps before are the reference's own, and those
    after follow a restore."""
    if how := _alone(drill):
        return inconclusive("job_not_repeatable", because="restored_twice", how=how)
    before = "the steps before are the reference's own, which was shown to repeat itself"
    return passed(f"began at step {drill.began} from the reference's checkpoint: {before}", began=drill.began)


def _alone(drill: Drill) -> str | None:
    """How one of two restarts from the same checkpoint differs from the reference at a place where the other does not."""
    first = drill.chaos.attempts[0] if drill.began else None
    restored = [attempt for attempt in drill.chaos.attempts if attempt.went_on and attempt is not first]
    for one, other in permutations(restored, 2):
        if (one.resume, one.resume_step) != (other.resume, other.resume_step) or injections(drill):
            continue
        again = {rank: trace.steps for rank, trace in other.traces.items()}
        both = (pair for pair in drill.pairs_apart(one) if pair[1].rank in again and again[pair[1].rank].get(pair[1].step))
        differing = next(filter(None, (drill.mismatch(*pair, drill.fields) for pair in both)), None)
        if differing is None or not _in_both(drill, other, differing.step):
            continue
        apart = (pair for pair in drill.pairs_apart(other) if pair[1].step <= differing.step)
        if not any(drill.mismatch(*pair, drill.fields) for pair in apart):
            where = f"{differing.field} differs from the reference at {differing.place}"
            point = one.resume or f"step {one.resume_step}"
            return f"of attempts that resumed from {point}, {where}, but not in attempt {other.number}"
    return None


def _starts(drill: Drill, first: Attempt) -> Iterator[tuple[Kind, str, str, str]]:
    for rank, start in first.starts.items():
        if expected := drill.reference_start(rank):
            if drill.streams_count:
                yield "rng", f"the RNG of rank {rank}", expected.rng, start.rng
            if drill.exact_weights:
                yield "weights", f"the initial weights of rank {rank}", expected.param, start.param


def _in_both(drill: Drill, attempt: Attempt, until: int) -> int:
    """Number of the attempt's records, up to a step, that the reference has, too."""
    spans = (span.part(span.first, until) for trace in attempt.traces.values() for span in trace.spans)
    return sum(map(drill.reference_lineage.common, spans))
