"""Each node's own file on a shared storage: made for the others to look for, or removed again."""

import shutil
from pathlib import Path

from msgspec import Struct

from chaosrun.checkpoint.storage_errors import storage_errors
from chaosrun.errors import ResourcesError
from chaosrun.preflight.probes.storage_place import Failed, Mount, mount_of, nearest_folder
from chaosrun.records.filesystem import Filesystem


class Written(Struct, frozen=True, kw_only=True):
    mount: Mount | None = None
    """Where the node wrote its file; None: it could not."""
    failed: Failed | None = None


def probe(*, storage: str, name: str, text: str, remove: bool) -> Written:
    """`name`: of the file and its folder, below the storage or the nearest existing folder."""
    try:
        with storage_errors(Path(storage)):
            mount = mount_of(nearest_folder(Path(storage)))
            path = Path(mount.base) / name
            if remove:
                shutil.rmtree(path.parent)
            else:
                path.parent.mkdir()
                Filesystem().write_durably(path, text.encode())
            return Written(mount=mount)
    except ResourcesError as error:
        return Written(failed=Failed.of(error))
