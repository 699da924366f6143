"""Known bugs of the libraries that a script trains with: a difference that looks like one is told with its thread. Pure.

A library is named only where its version has the bug and what was seen fits it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from chaosrun.verify.alignment import standing
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.divergence import Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A bug of a library."""

    library: str
    codes: tuple[str, ...]
    what: str
    thread: str
    before: str | None = None
    """The first release without it; None: none is known."""
    since: str = "0"
    beside: tuple[str, ...] = ()
    fits: Callable[[Drill, Divergence], bool] = lambda drill, found: True


def _later_pass(drill: Drill, found: Divergence) -> bool:
    """The undisturbed run was in a later pass over its data than the first."""
    record = drill.reference_lineage.at(found.rank, found.step)
    return record is not None and record.epoch > 0


def _before_accelerate_1_15(drill: Drill, found: Divergence) -> bool:
    """What accelerate does wrong below Trainer, accelerate has put right."""
    return _later_pass(drill, found) and _numbers(libraries(drill)["accelerate"]) < (1, 15)


def _place_in_the_data(drill: Drill, found: Divergence) -> bool:
    """It came back: the library was asked to resume."""
    began = next((standing(drill, each) for each in drill.chaos.attempts if each.number == found.attempt), None)
    return began is None or "data" not in began.wrong


def _later_weights(drill: Drill, found: Divergence) -> bool:
    step, base = found.reason.params.get("step"), found.reason.params.get("base")
    return isinstance(step, int) and isinstance(base, int) and step > base


_ORDER = ("sampler_epoch_not_set", "data_order_not_restored")
_PLACE = ("batches_repeated", "batches_skipped", *_ORDER)
KNOWN: tuple[Known, ...] = (
    Known(
        library="transformers",
        before="5.0.0",
        beside=("accelerate",),
        codes=_ORDER,
        fits=_before_accelerate_1_15,
        what="Trainer, resumed within a later epoch, reads another epoch's data (with accelerate < 1.15)",
        thread="transformers#40690",
    ),
    Known(
        library="transformers",
        codes=_PLACE,
        fits=_later_pass,
        what="Trainer, resumed in a later pass over a stream, begins at the stream's beginning",
        thread="transformers#26413",
    ),
    Known(
        library="transformers",
        codes=("optimizer_state_not_restored", "rng_not_restored"),
        fits=_place_in_the_data,
        what="Trainer goes on without a word where optimizer.pt or rng_state.pth is missing",
        thread="transformers#35782",
    ),
    Known(
        library="accelerate",
        before="1.13.0",
        beside=("torchdata",),
        codes=("batches_repeated",),
        fits=lambda drill, found: drill.spec.workers > 1,
        what="a stateful loader's state is taken ahead of the batches that were trained on, and goes back",
        thread="accelerate#3952",
    ),
    Known(
        library="accelerate",
        before="1.15.0",
        codes=_ORDER,
        fits=_later_pass,
        what="set_epoch before skip_first_batches is lost: the loader replays epoch 0",
        thread="accelerate#4071",
    ),
    Known(
        library="datasets",
        since="5.0.0",
        before="5.0.1",
        codes=_PLACE,
        fits=lambda drill, found: found.attempt > 2,
        what="a stream that was resumed gives a state that resumes at its beginning",
        thread="datasets#8295",
    ),
    Known(
        library="datasets",
        before="4.8.5",
        codes=("batches_skipped", "data_order_not_restored"),
        what="a stream resumed behind map() skips rows",
        thread="datasets#8145",
    ),
    Known(
        library="datasets",
        before="5.0.1",
        codes=_PLACE,
        what="a stream resumed behind a formatted filter() loses rows",
        thread="datasets#8360",
    ),
    Known(
        library="pytorch-lightning",
        before="2.5.4",
        codes=("saved_while_training", "weights_of_another_step", "optimizer_state_of_another_step"),
        fits=_later_weights,
        what="AsyncCheckpointIO saves tensors while training changes them",
        thread="Lightning#20953",
    ),
)
"""Of several that fit, the first is told."""


def libraries(drill: Drill) -> Mapping[str, str]:
    """What the script had imported when it began to train, by name, with the version."""
    found = (drill.chaos.environment or {}).get("libraries")
    return found if isinstance(found, Mapping) else {}


def known_of(divergence: Divergence, drill: Drill) -> Known | None:
    """The bug of a library that this difference looks like."""
    imported = libraries(drill)
    for bug in KNOWN:
        if divergence.reason.code not in bug.codes or any(name not in imported for name in (bug.library, *bug.beside)):
            continue
        version = _numbers(imported[bug.library])
        affected = _numbers(bug.since) <= version and (bug.before is None or version < _numbers(bug.before))
        if affected and bug.fits(drill, divergence):
            return bug
    return None


def told(reason: Cause) -> Cause:
    """The same cause, of a script that resumes by itself."""
    nowhere = reason.code == "data_order_not_restored" and "step" not in reason.params
    return replace(
        reason,
        params={"scope": "", **reason.params, "by": "script"},
        because=reason.because or ("of_none" if nowhere else None),
    )


def told_of(divergence: Divergence, drill: Drill) -> Divergence:
    """The same, with what is known of the library that it looks like."""
    reason = told(divergence.reason)
    if bug := known_of(divergence, drill):
        version = libraries(drill)[bug.library]
        fixed = f", not so since {bug.before}" if bug.before else ""
        known = f"{bug.library} {version}: {bug.what} ({bug.thread}{fixed})"
        reason = replace(reason, params={**reason.params, "known": known})
    return replace(divergence, reason=reason)


def _numbers(version: str) -> tuple[int, ...]:
    """ "1.14.0rc1" as (1, 14, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0].split("rc")[0].split(".dev")[0])[:3])
