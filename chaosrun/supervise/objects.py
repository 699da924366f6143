"""A run's objects in an object store: marks them as the run's own, and removes them."""

from pathlib import Path

from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.checkpoint.object_store import ObjectCheckpointStore
from chaosrun.errors import UnreachableStoreError, UsageError
from chaosrun.records.codec import encode
from chaosrun.records.layout import LEGS, LegLayout, RunLayout
from chaosrun.records.object_urls import ObjectPlace
from chaosrun.records.run_file import Owner, new_owner, own_leg, read_run

SilentStores = dict[object, UnreachableStoreError]
"""Stores that gave no answer, with the error; they are not asked again, as each request would wait for all retries."""
_OWNER = "owner.json"


def claim_objects(place: ObjectPlace, run: RunLayout) -> str:
    """Write an object below the run's URL that says which run it belongs to; returns the nonce. Raises ResourcesError when
    another run has it."""
    owner = new_owner(run)
    ObjectStorage(place).put_new(_OWNER, encode(owner))
    return owner.nonce


def remove_all_objects(run: RunLayout, home: Path, silent: SilentStores | None = None) -> None:
    """Remove the run's objects if they are shown to be its own. `home`: the directory of the run when it was whole. Raises
    UnreachableStoreError, at once for a store in `silent`, to which this adds stores that do not answer."""
    try:
        info = read_run(run)
        legs = [own_leg(run, info, name) for name in LEGS]
    except UsageError:
        return  # run.json is damaged, or copied from another run: nothing is removed because of it
    place = next((leg.objects for leg in legs if leg.objects), None)
    if place is None or info.storage_nonce is None:
        return
    silent = {} if silent is None else silent
    store = (place.bucket, tuple(place.env))  # any of its variables may name another store: FSSPEC_S3, AWS_PROFILE
    if store in silent:
        raise silent[store]
    around = ObjectStorage(ObjectPlace(place.url.rpartition("/")[0], place.env))
    try:
        if around.read(_OWNER) == encode(Owner(run=str(home.resolve()), nonce=info.storage_nonce)):
            for leg in legs:
                remove_objects(leg)
            around.delete(_OWNER)
    except UnreachableStoreError as error:
        silent[store] = error
        raise


def remove_objects(leg: LegLayout) -> None:
    if leg.objects is not None:
        ObjectCheckpointStore(leg, keep=0).clear()


def give_objects(leg: LegLayout, name: str) -> None:
    """Upload a checkpoint from a leg's directory to the leg's store."""
    if leg.objects is not None:
        ObjectCheckpointStore(leg, keep=0).adopt(name)
