"""Every check there is, in the order they are made: nodes beside each other, each for itself, several together."""

from chaosrun.preflight.checks.bits import BITS
from chaosrun.preflight.checks.cluster import CLUSTER
from chaosrun.preflight.checks.devices import DEVICES
from chaosrun.preflight.checks.drill import DRILL
from chaosrun.preflight.checks.forecast import FORECAST
from chaosrun.preflight.checks.host import HOST
from chaosrun.preflight.checks.kill import KILL
from chaosrun.preflight.checks.network import NETWORK
from chaosrun.preflight.checks.shared_storage import SHARED_STORAGE
from chaosrun.preflight.checks.storage import STORAGE
from chaosrun.preflight.model import Check

CHECKS: tuple[Check, ...] = (
    CLUSTER,
    HOST,
    DEVICES,
    BITS,
    STORAGE,
    KILL,
    NETWORK,
    SHARED_STORAGE,
    DRILL,
    FORECAST,
)
