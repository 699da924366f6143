"""An object store, as a node sees it: does it keep what a commit relies on, and does it list what it holds?"""

import time

from msgspec import Struct

from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.cluster.guard import new_name
from chaosrun.errors import ChaosrunError
from chaosrun.preflight.probes.storage_place import Failed
from chaosrun.records.places import ObjectPlace


class ObjectFacts(Struct, frozen=True, kw_only=True):
    took_s: float = 0.0
    """For all requests, the first of which connects."""
    late: bool = False
    """A listing did not show what had been put."""
    failed: Failed | None = None


def try_objects(url: str) -> ObjectFacts:
    """Put, conditional put, read, list, delete; leaves nothing. The settings are those of this process's environment."""
    storage, began_s = ObjectStorage(ObjectPlace(url)), time.monotonic()
    key = f"{new_name()}/object"
    try:
        storage.try_out()
        storage.put_new(key, b"listed")
        try:
            late = key not in storage.listed(key.partition("/")[0])
        finally:
            storage.delete(key)
    except ChaosrunError as error:
        return ObjectFacts(failed=Failed.of(error))
    return ObjectFacts(took_s=time.monotonic() - began_s, late=late)
