"""The JSON Schema of verdict.json, and of the `verdict` that `-o json` prints: every field, its meaning and its unit.

Versions: `v` is VERDICT_VERSION. It is incremented when a field is removed, renamed, or changes its type or meaning. Fields,
and values of an enumeration, may be added without that, so a reader should ignore what it does not know; the schema of a
release allows nothing that it does not list. The names of checks and their evidence may change without notice.
"""

from typing import Any, get_args

from chaosrun.faults.kind import PHASES
from chaosrun.faults.kinds import KINDS
from chaosrun.records.events import OUTCOMES
from chaosrun.verify.check import Status
from chaosrun.verify.codes import public_codes
from chaosrun.verify.compare import Kind
from chaosrun.verify.row import Part, Whose
from chaosrun.verify.ruling import EXIT_CODES, OUTCOME_EXIT_CODES
from chaosrun.verify.verdict import VERDICT_VERSION

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def verdict_schema() -> Schema:
    return {
        "$schema": DRAFT,
        "title": "chaosrun verdict",
        "description": "What a drill showed: a run's verdict.json, and `verdict` in what `chaosrun verify -o json` prints.",
        **_object(
            v={"const": VERDICT_VERSION, "description": "version of this schema"},
            status={"enum": list(EXIT_CODES), "description": "the verdict"},
            exit_code={
                "enum": sorted({*EXIT_CODES.values(), *OUTCOME_EXIT_CODES.values()}),
                "description": "what `chaosrun submit` and `verify` exit with",
            },
            code=_code("what the status rests on"),
            cause=_text("one sentence: what the status rests on"),
            hint=_maybe(_text("what to do about it; null where nothing can be said")),
            blame=_object(
                "whose fault it is",
                whose={
                    "enum": list(get_args(Whose)),
                    "description": "nobody of a PASS; planned: an injected corruption was found",
                },
                likely={"type": "boolean", "description": "the records point there without proving it"},
                part={"enum": [*get_args(Part), None], "description": "of the user's: where to look; else null"},
                reason=_text("a clause for people"),
            ),
            outcome={
                "enum": [*OUTCOMES, None],
                "description": "how the chaos leg ended, or the reference leg if that did not complete; null while it runs",
            },
            resume_by={"enum": ["chaosrun", "script"], "description": "whose save and resume were tested"},
            checks=_list(
                "in the order in which they were made",
                _object(
                    name=_text("the check, such as data_order"),
                    status={"enum": list(get_args(Status))},
                    code=_maybe(_code("what it found; null where it passed or was skipped")),
                    summary=_text("one sentence for people"),
                    evidence={"type": "object", "description": "what the check found, by name; differs from check to check"},
                ),
            ),
            divergence=_maybe(_divergence()),
            faults=_list("every fault of the plan, in its order", _fault()),
            attempts=_list("of the chaos leg, in order", _attempt()),
            steps=_count("last optimizer step of the chaos leg"),
            lost_steps=_count("steps done and rolled back, over all restarts"),
            warnings=_list("findings that do not change the verdict", _text("one sentence")),
        ),
    }


def _divergence() -> Schema:
    value = {
        "description": "of the kind of quantity that differs; floats are float.hex() text (C99 hexadecimal), digests and "
        "fingerprints are text, sample ids are as the loader gave them"
    }
    return _object(
        "the first place where the chaos leg left the reference; null where it did not",
        step=_count("optimizer step, from 1"),
        rank=_count("the lowest of `ranks`"),
        ranks=_list("ranks on which this differs at this step", _count("a rank")),
        attempt=_count("attempt of the chaos leg, from 1"),
        kind={"enum": list(get_args(Kind)), "description": "the quantity"},
        code=_code("what it is called"),
        cause=_text("in a few words, the same for the same mistake"),
        hint=_text("the particulars, and what to do"),
        tensor=_maybe(_text("name of the parameter or saved value")),
        micro_batch=_maybe(_count("index within the step's accumulation window, from 0")),
        expected=value,
        seen=value,
    )


def _fault() -> Schema:
    return _object(
        id=_text("its identity in the plan, such as F1"),
        description=_text("in words"),
        rank=_count("the rank it is done to"),
        phase={
            "enum": [*PHASES, None],
            "description": "the point in the worker; null of one that came after a delay, from outside",
        },
        step=_maybe({"type": "integer", "description": "where it fired; where it was planned to, if it did not"}),
        attempt=_maybe(_count("the attempt that it struck; null when it never fired")),
        landed={"type": "boolean", "description": "it is shown to have happened as planned"},
        problem=_maybe(_text("why it cannot be shown to have happened; null when it landed")),
        kind={"enum": list(KINDS), "description": "what was done"},
        evidence=_maybe(_text("what was seen of it, in a few words; null when it did not land")),
    )


def _attempt() -> Schema:
    return _object(
        attempt=_count("its number, from 1"),
        resumed_from=_maybe(
            _text("name of the checkpoint, or the step of a script's own; null when it began at the beginning")
        ),
        source=_maybe({"enum": ["storage", "memory"], "description": "where that was read: its files, or nodes' copies of it"}),
        resumed_step=_count("optimizer steps done when it began"),
        first_step=_maybe(_count("first optimizer step that any rank recorded in it; null when it recorded none")),
        last_step=_maybe(_count("last of them")),
        ended_by=_text("faults by their ids, an unplanned death, or how the leg ended"),
        lost_steps=_count("steps done or restored from which the next attempt did not resume"),
        recovery_s=_maybe(
            {
                "type": "number",
                "description": "seconds from the death or hang that ended the attempt before to the first step of this one; "
                "null where that is not known",
            }
        ),
        ranks=_count("ranks that began to train"),
        faults=_list("faults that ended it", _text("its id in the plan")),
        passed_over=_maybe(
            _count("step of a newer complete checkpoint from which a script did not resume; null where there is none")
        ),
    )


def _object(description: str | None = None, /, **fields: Schema) -> Schema:
    about = {} if description is None else {"description": description}
    return {**about, "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _list(description: str, items: Schema) -> Schema:
    return {"type": "array", "items": items, "description": description}


def _code(description: str) -> Schema:
    return {"enum": list(public_codes()), "description": f"{description}: a code of docs/causes.md"}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _count(description: str) -> Schema:
    return {"type": "integer", "minimum": 0, "description": description}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
