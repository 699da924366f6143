"""The events of a suite's journal."""

from typing import Any

import msgspec

from chaosrun.records.events import Event


class SuiteBegan(Event, frozen=True, kw_only=True, tag="suite.began"):
    """A process carries the suite out from here on."""


class SuiteEnded(Event, frozen=True, kw_only=True, tag="suite.ended"):
    """It does not any more."""


class DrillStarted(Event, frozen=True, kw_only=True, tag="drill.started"):
    name: str
    run: str


class DrillEnded(Event, frozen=True, kw_only=True, tag="drill.ended"):
    name: str
    result: dict[str, Any]
    """See `campaign.results.DrillResult`."""


SuiteEvent = SuiteBegan | SuiteEnded | DrillStarted | DrillEnded
SUITE_EVENTS = msgspec.json.Decoder(SuiteEvent)
