"""The few operations that a checkpoint store needs from an object store: put, put if absent, read, list, delete; through
fsspec.

Every failure that the user can fix is raised as a ResourcesError with the place and a hint; an unknown scheme or a missing
library as a UsageError. Must not know what the objects mean.
"""

import base64
import errno
import hashlib
import os
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from chaosrun.errors import ChaosrunError, ResourcesError, UnreachableStoreError, UsageError
from chaosrun.records.filesystem import Moment
from chaosrun.records.manifest import FileEntry
from chaosrun.records.object_urls import LIBRARIES, ObjectPlace

WAITS_S = (0.2, 0.8, 3.2, 9.6)
"""Waits before a request is repeated that the store refused for its rate or failed at, or to which no connection was made. With
s3fs's own, less in all than the shortest time after which a rank counts as hung."""
S3_TRIES = 3
"""By s3fs, each time, with 0.6 s of waits; botocore below it repeats nothing. By default both repeat what the other does: of a
throttled store no error came for minutes, and the attempt was ended as one that hangs."""
ONE_REQUEST_BYTES = 100 << 20
"""s3fs puts files below this size in one request, which can carry a checksum for the store to compare."""
Kind = Literal["put", "create", "read", "fetch", "look", "list", "delete"]
Listener = Callable[[Kind, str, Moment], None]
_T = TypeVar("_T")

_ENDPOINT = (
    "is the store up, and the endpoint right? env: {AWS_ENDPOINT_URL: …} in the job file names another one, "
    "FSSPEC_S3_… other settings"
)
_CREDENTIALS = "give them in the environment, or in the job file's env: {AWS_ACCESS_KEY_ID: …, AWS_SECRET_ACCESS_KEY: …}"
_HINTS = {
    "NoCredentialsError": _CREDENTIALS,
    "PartialCredentialsError": _CREDENTIALS,
    "DefaultCredentialsError": "give them in the environment, or in the job file's env: {GOOGLE_APPLICATION_CREDENTIALS: …}",
    "EndpointConnectionError": _ENDPOINT,
    "ConnectTimeoutError": _ENDPOINT,
    "PermissionError": "the credentials must be valid, and allow to list, read, put and delete objects there",
    "FileNotFoundError": "make the bucket, or name another one with checkpoint.storage",
}
_OPTIONS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_PROFILE": "profile",
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_ENDPOINT_URL_S3": "endpoint_url",
}
_UNCONNECTED = ("ConnectionError", "HTTPClientError", "ClientConnectionError")
_UNREACHABLE = (*_UNCONNECTED, "TimeoutError")
_PASSING = (errno.EBUSY, errno.EREMOTEIO)
"""What s3fs makes of a refusal for the rate of requests (503), and of a failure inside the store (500)."""


class ObjectStorage:
    """Objects below one URL, by keys relative to it.

    Python's random stream is restored after each request, as the library draws from it for retries, and a save must not change
    the training.
    """

    def __init__(self, place: ObjectPlace) -> None:
        self._place = place
        self._scheme, _, self._root = place.url.partition("://")
        self._made: Any = None
        self.listeners: list[Listener] = []
        """Called with each request and its key. If one raises, that counts as the store's answer, or as no answer."""

    @property
    def fs(self) -> Any:
        """The fsspec file system, made at the first use. Raises UsageError when its library is not installed."""
        if self._made is None:
            self._made = _file_system(self._scheme, dict(self._place.env))
        return self._made

    def url(self, key: str) -> str:
        return f"{self._place.url}/{key}"

    def put_file(self, path: Path, key: str, entry: FileEntry) -> None:
        """Upload a file of known size, and check that the store has all of it."""
        options: dict[str, str] = {}
        if self._scheme == "s3" and entry.size < ONE_REQUEST_BYTES:
            with path.open("rb") as file:
                options = {"ChecksumSHA256": base64.b64encode(hashlib.file_digest(file, "sha256").digest()).decode()}
        self._ask("put", key, lambda: self.fs.put_file(str(path), self._path(key), **options))
        if self._scheme == "file":
            self._sync(key)
        if (size := self.size(key)) != entry.size:
            raise ResourcesError(
                f"checkpoint storage failed at {self.url(key)}: it has {size} bytes of the {entry.size} that were put",
                hint="the store has lost data: look at its own logs",
            )

    def put_new(self, key: str, data: bytes) -> None:
        """Put an object that does not exist yet; of several concurrent callers, one succeeds. If the object already has exactly
        these bytes, an earlier try succeeded but its reply was lost.

        Raises ResourcesError if the object has other bytes, and leaves it as it is.
        """
        try:
            self._ask("create", key, lambda: self._create(key, data), passes=FileExistsError)
        except (FileExistsError, ResourcesError) as error:
            there = self.read(key)
            if there == data:
                return
            if there is None and isinstance(error, ResourcesError):
                raise
            raise ResourcesError(
                f"{self.url(key)} exists already and belongs to another run: nothing was overwritten",
                hint="two runs must not share one place: name another prefix with checkpoint.storage, or stop the other run",
            ) from error

    def read(self, key: str) -> bytes | None:
        """The bytes of an object; None if there is no such object."""
        return self._ask_of("read", key, lambda: self.fs.cat_file(self._path(key)))

    def fetch(self, key: str, path: Path) -> bool:
        """Download to a new file; False when there is no such object."""
        try:
            self._ask("fetch", key, lambda: self.fs.get_file(self._path(key), str(path)), passes=FileNotFoundError)
        except FileNotFoundError:
            return False
        return True

    def size(self, key: str) -> int | None:
        """Size of an object in bytes, looked up by key; None if there is none."""
        found = self._ask_of("look", key, lambda: self.fs.info(self._path(key)))
        return None if found is None else int(found["size"])

    def listed(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix` and a slash, as the store lists them; a listing may be out of date."""
        found: list[str] = self._ask_of("list", prefix, lambda: self.fs.find(self._path(prefix))) or []
        start = len(self.fs._strip_protocol(self._path(""))) + 1
        return sorted(path[start:] for path in found if not path.endswith(".tmp"))

    def delete(self, key: str) -> None:
        """Delete an object, which need not exist."""
        self._ask_of("delete", key, lambda: self.fs.rm_file(self._path(key)))
        if self._scheme == "file" and "/" in key:
            with suppress(OSError):  # not empty, or gone: an object store has no directories to leave behind
                os.rmdir(os.path.dirname(self._path(key)))

    def try_out(self) -> None:
        """Put, read, list and delete an object, and check that a second conditional put is refused; leaves nothing.

        Raises UsageError if it is not refused: such a store cannot commit. ResourcesError if a request fails.
        """
        key = f".chaosrun-{secrets.token_hex(8)}"
        self.put_new(key, b"first")
        try:
            with suppress(FileExistsError):
                self._ask("create", key, lambda: self._create(key, b"second"), passes=FileExistsError)
            if (there := self.read(key)) != b"first":
                raise UsageError(
                    f"{self._place.url} ignores conditional puts: an object was overwritten by a put that forbade it "
                    f"(it holds {there!r})",
                    hint="checkpoints need a store with conditional puts (If-None-Match), as S3 and GCS have: name another one",
                )
        finally:
            self.delete(key)

    def _create(self, key: str, data: bytes) -> None:
        """Put an object. Raises FileExistsError if it exists."""
        path = self._path(key)
        if self._scheme != "file":
            self.fs.pipe_file(path, data, mode="create")
            return
        # Written whole under another name, then linked: a reader sees all or nothing, and only the first link succeeds.
        temporary = f"{path}.{os.getpid()}.tmp"
        self.fs.pipe_file(temporary, data)
        try:
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
        self._sync(key)

    def _sync(self, key: str) -> None:
        """fsync a file and the directories that lead to it, up to the URL's own."""
        path = Path(self._path(key))
        for part in (path, *path.parents[: key.count("/") + 1]):
            descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def _ask_of(self, kind: Kind, key: str, request: Callable[[], _T]) -> _T | None:
        """Make a request for what may not be there: None then."""
        with suppress(FileNotFoundError):
            return self._ask(kind, key, request, passes=FileNotFoundError)

    def _ask(self, kind: Kind, key: str, request: Callable[[], _T], *, passes: type[OSError] | tuple[()] = ()) -> _T:
        """Make a request, with retries. `passes`: exceptions that are raised unchanged."""
        waits_s = iter(WAITS_S)
        while True:
            stream = random.getstate()
            try:
                self._tell(kind, key, "before")
                result = request()
                self._tell(kind, key, "after")
                return result
            except ChaosrunError:
                raise
            except Exception as error:  # from three libraries, each with its own hierarchy of errors
                if isinstance(error, passes) and "bucket does not exist" not in str(error):
                    raise
                wait_s = next(waits_s, None) if _may_pass(error) else None
                if wait_s is None:
                    raise self._as_resources_error(key, error) from error
            finally:
                random.setstate(stream)
            time.sleep(wait_s)

    def _tell(self, kind: Kind, key: str, moment: Moment) -> None:
        for listener in tuple(self.listeners):
            listener(kind, key, moment)

    def _as_resources_error(self, key: str, error: Exception) -> ResourcesError:
        kinds = _kinds(error)
        hint = next((_HINTS[kind] for kind in kinds if kind in _HINTS), None)
        if isinstance(error, OSError) and error.errno == errno.EBUSY:
            hint = "the store limits the rate of requests: save less often (checkpoint.every_steps), or ask for a higher rate"
        reason = " ".join((getattr(error, "strerror", None) or str(error) or kinds[0]).split())
        failed = UnreachableStoreError if any(kind in _UNREACHABLE for kind in kinds) else ResourcesError
        message = f"checkpoint storage failed at {self.url(key)}: {reason}"
        return failed(message, hint=hint or "see the message of the store above")


def _kinds(error: Exception) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def _may_pass(error: Exception) -> bool:
    """Whether another try soon may succeed; not after a timeout, which has waited long already."""
    kinds = _kinds(error)
    unconnected = any(kind in _UNCONNECTED for kind in kinds) and not any("Timeout" in kind for kind in kinds)
    return unconnected or getattr(error, "errno", None) in _PASSING


def _file_system(scheme: str, env: dict[str, str]) -> Any:
    from fsspec import filesystem
    from fsspec.config import set_conf_env

    settings: dict[str, dict[str, object]] = {}
    set_conf_env(settings, {**os.environ, **env})
    # boto reads the environment itself; variables that only the job file's env sets are passed to it.
    told: dict[str, object] = {option: env[name] for name, option in _OPTIONS.items() if scheme == "s3" and name in env}
    if scheme == "s3" and (region := env.get("AWS_REGION", env.get("AWS_DEFAULT_REGION"))):
        told["client_kwargs"] = {"region_name": region}
    if scheme == "gs" and "GOOGLE_APPLICATION_CREDENTIALS" in env:
        told["token"] = env["GOOGLE_APPLICATION_CREDENTIALS"]
    options = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False, **told}
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}} if scheme == "s3" else {}
    try:
        made = filesystem(scheme, skip_instance_cache=True, **{**once, **settings.get(scheme, {}), **options})
    except ImportError as error:
        raise UsageError(
            f"checkpoint.storage {scheme}://… needs {LIBRARIES[scheme]}, which is not installed",
            hint=f"pip install 'chaosrun[{scheme}]'",
        ) from error
    if scheme == "s3":
        made.retries = S3_TRIES
    return made
