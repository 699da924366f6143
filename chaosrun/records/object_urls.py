"""URLs of object stores that hold checkpoints, and which of them checkpoints can be committed to."""

import importlib.util
import re
from dataclasses import dataclass

LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}
"""By scheme with a conditional put, the library that fsspec needs for it."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """Where the checkpoints of a leg are in an object store."""

    url: str
    """Without a slash at its end."""
    env: tuple[tuple[str, str], ...] = ()
    """The job's environment variables, for a process that is not one of its ranks."""

    @property
    def bucket(self) -> str:
        """Its scheme and bucket alone."""
        return "/".join(self.url.split("/")[:3])


def is_url(place: str) -> bool:
    return _URL.match(place) is not None


def why_no_store(url: str) -> tuple[str, str] | None:
    """Why checkpoints cannot be committed to this URL, and what to do, as far as is known without contacting the store."""
    scheme, _, place = url.partition("://")
    if scheme not in LIBRARIES:
        known = ", ".join(f"{each}://" for each in LIBRARIES)
        return f"a commit needs a conditional put, which chaosrun does not know of {scheme}://", f"name a directory, or {known}"
    if not place.strip("/"):
        return "it names no bucket", f"such as {scheme}://bucket/prefix"
    if scheme == "file" and not place.startswith("/"):
        return "its path is not absolute", f"write file:///{place}, with three slashes"
    if importlib.util.find_spec(LIBRARIES[scheme]) is None:
        return f"it needs {LIBRARIES[scheme]}, which is not installed", f"pip install 'chaosrun[{scheme}]', on every node"
    return None
