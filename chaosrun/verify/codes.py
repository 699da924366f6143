"""The causes of verdicts as codes with parameters; one table has their sentences, hints, blame and hazard rows.

Decide by codes, never by sentences. To add a cause, add a row to one of the modules `code_*`, and name its code where it is
found. docs/causes.md is generated from the rows.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaosrun.records.layout import RUN
from chaosrun.verify.code_checks import CHECK_ROWS
from chaosrun.verify.code_differences import DIFFERENCE_ROWS, QUANTITIES
from chaosrun.verify.code_ends import END_ROWS
from chaosrun.verify.code_resume import RESUME_ROWS
from chaosrun.verify.code_streams import OF_OWN_RESUME
from chaosrun.verify.row import Blame, Row, unknown
from chaosrun.wording import count, listed

Params = dict[str, Any]
"""The parameters of a code's sentence; an open set, as in verdict.json."""
TABLE: Mapping[str, Row] = {**DIFFERENCE_ROWS, **CHECK_ROWS, **END_ROWS, **RESUME_ROWS}


class _Words(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list | tuple):
            return listed([str(each) for each in value], int(format_spec or len(value)))
        if format_spec == "leg":
            return RUN if value == RUN else f"{value} leg"
        if isinstance(value, int) and format_spec.isalpha():
            return count(value, format_spec, "batches" if format_spec == "batch" else None)
        return format(str(value) if value is None else value, format_spec)


_WORDS = _Words()
OWN = "own"
"""The `because` of a row that replaces or adds to a code's row if the script resumes by itself."""
_EVIDENCE = {
    **{"outside": "state.outside", "lost_streams": "streams.lost", "also_saved": "beside.saved"},
    **{"had": "values.apart", "as_saved": "values.as_saved", "ahead": "files.ahead", "set": "modules.set"},
    **{"unlike_rates": "drift.rates", "seeded_again": "streams.seeded_again"},
}
"""Rows whose hint is put before the cause's own, by the parameter that the cause then has."""
_SAVED = "save it with the checkpoint, and restore it"
REMEDIES: Mapping[str, Mapping[str, str]] = {
    "chaosrun": {
        "kept": "pass it to run.register; in a drill, `chaosrun diagnose` names what differs",
        "named": "pass what holds it to run.register",
        "counted": "prepare a scheduler, or pass what it counts to run.register",
        "scheduler": "prepare the scheduler, or pass it to run.register",
        "averaged": "pass DistributedDataParallelKwargs(find_unused_parameters=True) if ranks take different branches, call "
        "the model that prepare() returned and not model.module (Local SGD needs checkpoints of the script's own)",
    },
    "script": {
        "kept": _SAVED,
        "named": _SAVED,
        "counted": "save it and the scheduler's state with the checkpoint, and load both again",
        "scheduler": "save and load the scheduler's state with the optimizer's",
        "averaged": "find_unused_parameters=True if ranks take different branches, call the wrapped model and not model.module",
    },
}
"""What to do, by who resumes; rows name it in braces."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A code of the table, and the parameters that fill its templates. `because` names a row that says more: its hint and blame
    replace the code's own. `<code>.<because>` is looked up first, and may have another sentence."""

    code: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    because: str | None = None

    @classmethod
    def of(cls, code: str, /, *, because: str | None = None, **params: Any) -> "Cause":
        return cls(code, params, because)

    @property
    def sentence(self) -> str:
        own = [f"{self.code}.{because}" for because in (self.because, OWN)]
        said = (TABLE[name].sentence for name in self._names() if name in own)
        return self._filled(next(filter(None, said), _row(self.code).sentence))

    @property
    def hint(self) -> str | None:
        hint = next((self._filled(row.hint) for row in self._rows() if row.hint is not None), None)
        for evidence in self._evidence():
            hint = f"{self._filled(evidence.hint or '')}. If that is not the cause: {hint}"
        if "first_hint" in self.params:
            hint = f"{hint}. Of the first difference: {self.params['first_hint']}"
        return f"{self.params['known']}: {hint}" if "known" in self.params else hint

    @property
    def blame(self) -> Blame:
        found = next((row.blame for row in self._rows() if row.blame is not None), None)
        if found is None:
            return unknown(self.sentence)
        if found.whose == "chaosrun" and self.code in DIFFERENCE_ROWS and self.params.get("by") == "script":
            return OF_OWN_RESUME  # chaosrun restored nothing
        reason = self._filled(found.reason)
        return Blame(whose=found.whose, likely=found.likely, part=found.part, reason=reason)

    @property
    def hazard(self) -> str | None:
        # What else may explain a difference is named first where the difference itself says nothing.
        rows = (*self._evidence(), *self._rows()) if self.code in QUANTITIES else (*self._rows(), *self._evidence())
        return next((row.hazard for row in rows if row.hazard is not None), None)

    def explained(self, because: str | None, **params: Any) -> "Cause":
        return Cause(self.code, {**self.params, **params}, because)

    def _evidence(self) -> list[Row]:
        return [TABLE[name] for param, name in _EVIDENCE.items() if param in self.params]

    def _rows(self) -> list[Row]:
        return [TABLE[name] for name in self._names()]

    def _names(self) -> list[str]:
        names = [f"{self.code}.{self.because}", self.because] if self.because else []
        if self.params.get("by") == "script":
            names = [*(["library.known"] if "known" in self.params else []), *names, f"{self.code}.{OWN}"]
        return [name for name in (*names, self.code) if name in TABLE]

    def _filled(self, template: str) -> str:
        usual = {"code": self.code, "scope": "", "by_all": "", "of_rank": "", **REMEDIES[self.params.get("by", "chaosrun")]}
        return _WORDS.vformat(template, (), {**usual, **self.params})


def _row(code: str) -> Row:
    assert code in TABLE, f"{code} is not in the table of causes"
    return TABLE[code]


def public_codes() -> tuple[str, ...]:
    """The codes that a verdict may name, in the order of the table, without the rows that only add to another."""
    return tuple(name for name in TABLE if "." not in name)
