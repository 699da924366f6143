"""Which function strikes for which kind. A kind whose striker is the supervisor has none here."""

from collections.abc import Callable, Mapping

from chaosrun.inject import process
from chaosrun.inject.strike import Strike

__all__ = ["ARMS"]

ARMS: Mapping[str, Callable[[Strike], None]] = {
    "kill": process.kill,
}
