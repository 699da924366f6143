import json

import pytest
from pydantic import ValidationError

from chaosrun.errors import UsageError
from chaosrun.records.manifest import FileEntry, Manifest, ManifestPosition

ENTRY = FileEntry(size=3, xxh3="ab" * 16)


def manifest(**changes):
    fields = {
        "step": 50,
        "position": ManifestPosition(epoch=1, batches=7, step=50),
        "world_size": 3,
        "attempt": 2,
        "time_s": 1.5,
        "job_fingerprint": "f" * 16,
        "files": {"model.safetensors": ENTRY, "rng/rank-0.bin": ENTRY},
        "digests": {"model": {"weight": "00ff"}, "lr": 0.1, "none": None},
    }
    return Manifest(**{**fields, **changes})


def test_bytes_come_back_as_the_same_value():
    before = manifest()
    assert Manifest.from_bytes(before.to_bytes()) == before
    assert Manifest.from_bytes(before.to_bytes()).to_bytes() == before.to_bytes()


def test_every_single_flipped_bit_is_found():
    data = manifest().to_bytes()
    for place in range(len(data)):
        for bit in range(8):
            damaged = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            with pytest.raises(ValueError):
                Manifest.from_bytes(damaged)


def test_every_truncation_is_found():
    data = manifest().to_bytes()
    for length in range(len(data)):
        with pytest.raises(ValueError):
            Manifest.from_bytes(data[:length])


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other", "a/../b", "a//b", "./a", "", ".", "a/", "a\\b", "a\0b", "MANIFEST.json"]
)
def test_only_plain_relative_paths_are_members(name):
    with pytest.raises(ValidationError):
        manifest(files={name: ENTRY})


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 3},
        {"step": 49},
        {"step": -1},
        {"world_size": 0},
        {"time_s": float("nan")},
        {"extra": 1},
        {"files": {"a": {"size": -1, "xxh3": "0" * 32}}},
        {"files": {"a": {"size": 1, "xxh3": "0" * 31}}},
        {"files": {"a": {"size": 1, "xxh3": "0" * 32 + "\n"}}},
    ],
)
def test_wrong_fields_are_refused(changes):
    with pytest.raises(ValidationError):
        manifest(**changes)


def test_an_edited_manifest_is_refused_even_when_it_is_well_formed():
    fields = json.loads(manifest().to_bytes())
    fields["position"]["batches"] = 8
    with pytest.raises(ValueError, match="its own sha256 does not match"):
        Manifest.from_bytes((json.dumps(fields, sort_keys=True, indent=1) + "\n").encode())


@pytest.mark.parametrize(
    ("data", "why"), [(b"", "not JSON"), (b"[]", "not a JSON object"), (b"{}", "Field required"), (b"\xff", "not JSON")]
)
def test_the_reason_is_one_line(data, why):
    with pytest.raises(ValueError, match=why) as caught:
        Manifest.from_bytes(data)
    assert "\n" not in str(caught.value)


def test_digests_must_be_json():
    with pytest.raises(ValueError):
        manifest(digests={"loss": float("nan")}).to_bytes()


def test_a_manifest_of_version_1_is_said_to_be_one():
    fields = json.loads(manifest().to_bytes()) | {"v": 1, "files": {"a": {"size": 1, "sha256": "0" * 64}}}
    with pytest.raises(UsageError, match="is of version 1: an earlier chaosrun wrote it"):
        Manifest.from_bytes(json.dumps(fields).encode())
