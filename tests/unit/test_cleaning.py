"""`chaosrun clean`: what goes and what stays; nothing else is touched, whatever a run says of itself and whenever it stops."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from chaosrun import cli
from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.errors import ResourcesError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.housekeeping import cleaning
from chaosrun.housekeeping.cleaning import Cleaning, clean
from chaosrun.housekeeping.inventory import KeptPlace, Storage, choose, inventory_of
from chaosrun.records.layout import RunLayout
from chaosrun.records.object_urls import ObjectPlace
from chaosrun.spec.job_file import load_job
from chaosrun.supervise.creation import create_run
from chaosrun.supervise.drill import lock_run
from chaosrun.supervise.find_runs import list_runs, remove_run

DAY_S = 86400.0
OLD_S = 30 * DAY_S


def found(name: str, age_d: float, status: str = "PASS", **more: Any) -> KeptPlace:
    return KeptPlace(kind=more.pop("kind", "run"), path=Path("/root/runs") / name, used_s=-age_d * DAY_S, status=status, **more)


def needing(name: str, age_d: float, needed: str, status: str = "PASS") -> KeptPlace:
    return found(name, age_d, status, needs=frozenset({Path("/root/runs") / needed}))


NEWEST = [found("a", 20), found("b", 30), found("c", 40), found("r", 50, "cached", kind="reference")]
JUST_BEGUN = [found("a", 20, starting=True), found("b", 0, "interrupted", starting=True), found("c", 0, "interrupted")]
NEEDED = "a run that is kept needs the reference"


@pytest.mark.parametrize(
    ("entries", "options", "removed", "kept"),
    [
        ([found("a", 15), found("b", 13)], {}, "a", {"b": "not old enough"}),
        ([found("a", 15), found("b", 13)], {"older_than_s": 0.0}, "ab", {}),
        (NEWEST, {"keep": 1}, "bc", {"a": "among the newest 1", "r": "among the newest 1"}),
        # A reference is no evidence.
        ([found("a", 20, "cached", kind="reference")], {}, "a", {}),
        (JUST_BEGUN, {"older_than_s": 0.0, "failed": True}, "ac", {"b": "just begun"}),
        ([found("a", 20, supervised=True)], {"failed": True}, "", {"a": "being supervised"}),
        ([found("a", 20), needing("b", 1, "a", "interrupted")], {}, "", {"a": NEEDED, "b": "not old enough"}),
        ([found("a", 20), needing("b", 1, "a", "interrupted")], {"older_than_s": 0.0, "failed": True}, "ab", {}),
        # A suite of which a run is needed; a run that is needed by one that is needed.
        (
            [found("s", 20, kind="suite"), found("t", 20, kind="suite"), needing("b", 1, "s/runs/a")],
            {},
            "t",
            {"s": NEEDED, "b": "not old enough"},
        ),
        (
            [found("a", 20), needing("b", 20, "a"), needing("c", 1, "b")],
            {},
            "",
            {"a": NEEDED, "b": NEEDED, "c": "not old enough"},
        ),
        *(
            ([found("a", 20, status), found("b", 20, status, kind="sweep")], options, removed, dict.fromkeys(kept, why))
            for status in ("FAIL", "INCONCLUSIVE", "interrupted", "damaged")
            for why in [f"{status}: removed with --failed only"]
            for options, removed, kept in (({}, "", "ab"), ({"failed": True}, "ab", ""))
        ),
    ],
)
def test_what_goes(entries: list[KeptPlace], options: dict[str, Any], removed: str, kept: dict[str, str]) -> None:
    """The rule alone; ages in days, now is 0."""
    choice = choose(entries, **{"now_s": 0.0, "older_than_s": 14 * DAY_S, "keep": 0, "failed": False, **options})
    assert {entry.name for entry in choice.removed} == {*removed}
    assert {entry.found.name: entry.why for entry in choice.kept} == kept


def run_of(
    root: Path, name: str, status: str | None, *, storage: str | None = None, reference: str = "auto", **more: Any
) -> RunLayout:
    """A run as it lies there a month later."""
    values: dict[str, Any] = {"name": name, "script": "train.py", "workers": 2, "checkpoint": {"storage": storage}, **more}
    root.parent.mkdir(parents=True, exist_ok=True)
    (root.parent / "train.py").write_text("import chaosrun\n")
    path = root.parent / f"{name}.yaml"
    path.write_text(json.dumps(values))
    run = create_run(root, load_job(path), plan=FaultPlan(seed=0, faults=()), overrides=[], reference=reference)
    if status is not None:
        run.verdict_json.write_text(json.dumps({"status": status, "outcome": "completed"}))
    info = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**info, "created_s": time.time() - OLD_S}))
    for leg in ("reference", "chaos"):
        place = info["storage"][leg]
        checkpoint = (Path(place) if place and "://" not in place else run.leg(leg).path) / "checkpoints" / "step-00000005"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(b"x" * 10_000)
    return run


def cleaned(root: Path, **options: Any) -> Cleaning:
    return clean(root, **{"older_than_s": 14 * DAY_S, "keep": 0, "failed": False, "agreed": lambda _: True, **options})


def put(run: RunLayout, key: str, data: bytes = b"x") -> None:
    """An object of a run's, in a store that is a directory."""
    place = json.loads(run.run_json.read_text())["storage"]["chaos"].removeprefix("file://")
    path = Path(place).parent / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def age(path: Path, age_s: float) -> None:
    then_s = time.time() - age_s
    os.utime(path, (then_s, then_s))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


class TestClean:
    def test_removes_what_passed_with_its_checkpoints(self, root: Path, tmp_path: Path) -> None:
        there, elsewhere = run_of(root, "there", "PASS"), run_of(root, "elsewhere", "PASS", storage="big")
        failed = run_of(root, "failed", "FAIL", storage="big")
        mine = tmp_path / "big" / "mine"
        mine.mkdir()
        done = cleaned(root)
        assert done.done and {entry.name for entry in done.choice.removed} == {there.run_id, elsewhere.run_id}
        assert [run.run_id for run in list_runs(root)] == [failed.run_id]
        assert sorted(os.listdir(tmp_path / "big")) == sorted(["mine", failed.run_id])
        assert done.freed_bytes >= 40_000
        assert not (root / "runs" / ".trash").exists()
        assert cleaned(root).empty

    def test_removes_the_objects_of_a_run_and_nobody_else_s(self, root: Path, tmp_path: Path) -> None:
        bucket = tmp_path / "bucket"
        run, kept = (run_of(root, name, status, storage=f"file://{bucket}") for name, status in (("a", "PASS"), ("b", "FAIL")))
        copied = run_of(root, "c", "PASS", storage=f"file://{bucket}")
        for each in (run, kept, copied):
            put(each, "chaos/data/step-00000005.attempt-1/model.safetensors")
            put(each, "chaos/checkpoints/step-00000005.attempt-1.json")
        put(run, "chaos/mine.txt")
        # A run whose place another one has claimed: a copy of a folder, say.
        put(copied, "owner.json", b"another's")
        cleaned(root)
        assert [each.run_id for each in list_runs(root)] == [kept.run_id]
        left = {path.relative_to(bucket).parts for path in bucket.rglob("*") if path.is_file()}
        assert {parts[1:] for parts in left if parts[0] == run.run_id} == {("chaos", "mine.txt")}
        assert {parts[-1] for parts in left if parts[0] == kept.run_id} == {
            "owner.json",
            "model.safetensors",
            "step-00000005.attempt-1.json",
        }
        assert sum(parts[0] == copied.run_id for parts in left) == 3, "what is not shown to be its own stays"

    def test_an_object_store_that_cannot_be_reached_is_told_and_asked_again(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = tmp_path / "bucket"
        put(run_of(root, "a", "PASS", storage=f"file://{bucket}"), "chaos/data/step-00000005.attempt-1/model.safetensors")

        def refuse(self: ObjectStorage, kind: str, key: str, moment: str) -> None:
            raise PermissionError("Access Denied")

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStorage, "_tell", refuse)
            with pytest.raises(ResourcesError, match=r"checkpoint storage failed at file://.*/owner\.json: Access Denied"):
                cleaned(root)
        assert list_runs(root) == [] and any(path.is_file() for path in bucket.rglob("*"))
        assert cleaned(root).done
        assert not any(path.is_file() for path in bucket.rglob("*"))

    def test_one_that_cannot_be_removed_does_not_keep_the_others(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A store that is gone for good, of a run that comes first; its folder in the trash gives its objects up."""
        run_of(root, "a", "PASS", storage=f"file://{tmp_path}/bucket")
        run_of(root, "b", "PASS")

        def refuse(self: ObjectStorage, kind: str, key: str, moment: str) -> None:
            raise OSError("Could not connect")

        monkeypatch.setattr(ObjectStorage, "_tell", refuse)
        with pytest.raises(ResourcesError, match=r"owner\.json: Could not connect") as caught:
            cleaned(root)
        (left,) = (root / "runs" / ".trash").iterdir()
        assert caught.value.hint is not None and caught.value.hint.endswith(f"remove {left}")
        assert list_runs(root) == []
        run_of(root, "c", "PASS")
        with pytest.raises(ResourcesError, match="Could not connect"):
            cleaned(root)
        assert list_runs(root) == []

    def test_a_store_that_does_not_answer_is_asked_once(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each request waits for the library's retries. Another store is asked all the same."""
        for name, env in (("a", {}), ("b", {}), ("c", {}), ("d", {"AWS_PROFILE": "other"})):
            run = run_of(root, name, "PASS", storage=f"file://{tmp_path}/bucket", env=env)
            put(run, "chaos/data/step-00000005.attempt-1/model.safetensors")
        asked: list[str] = []

        def refuse(self: ObjectStorage, kind: str, key: str, moment: str) -> None:
            asked.append(key)
            raise ConnectionRefusedError("Could not connect")

        monkeypatch.setattr(ObjectStorage, "_tell", refuse)
        monkeypatch.setattr("chaosrun.checkpoint.object_storage.WAITS_S", ())
        with pytest.raises(ResourcesError, match=r"owner\.json: Could not connect; nor can 3 more"):
            cleaned(root)
        assert len(asked) == 2 and list_runs(root) == []
        monkeypatch.setattr(ObjectPlace, "bucket", property(lambda place: place.url))
        with pytest.raises(ResourcesError, match="nor can 3 more"):
            cleaned(root)
        assert len(asked) == 6

    def test_removes_nothing_that_is_not_agreed_to(self, root: Path) -> None:
        run_of(root, "a", "PASS")
        before = everything(root)
        asked: list[Cleaning] = []
        done = cleaned(root, agreed=lambda intended: bool(asked.append(intended)))
        assert not done.done and len(asked[0].choice.removed) == 1
        assert everything(root) == {*before, ".clean.lock"}

    def test_leaves_what_is_supervised(self, root: Path) -> None:
        run = run_of(root, "a", "PASS")
        with lock_run(run):
            assert cleaned(root).empty
        assert cleaned(root).done

    def test_leaves_what_comes_to_be_supervised_meanwhile(self, root: Path) -> None:
        run, other = run_of(root, "a", "PASS"), run_of(root, "b", "PASS")
        locks = []

        def agreed(_: Cleaning) -> bool:
            locks.append(lock_run(run))
            locks[0].__enter__()
            return True

        done = cleaned(root, agreed=agreed)
        locks[0].__exit__(None, None, None)
        assert [entry.name for entry in done.choice.removed] == [other.run_id]
        assert "is being supervised by process" in done.choice.kept[0].why
        assert run.run_json.is_file()

    def test_leaves_the_reference_of_a_run_that_has_yet_to_copy_it(self, root: Path) -> None:
        used = run_of(root, "used", "PASS")
        waiting = run_of(root, "waiting", None, reference=str(used.path.resolve()))
        assert cleaned(root).empty
        waiting.reference.journal.write_text(
            '{"event": "leg.finished", "outcome": "completed", "message": null, "final_step": 5}\n'
        )
        assert [entry.name for entry in cleaned(root).choice.removed] == [used.run_id]

    @pytest.mark.parametrize("where", [None, ".chaosrun", "link"])
    def test_leaves_it_under_whatever_name_the_root_is_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | None
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("CHAOSRUN_ROOT", raising=False)
        (tmp_path / "link").symlink_to(tmp_path / ".chaosrun")
        used = run_of(tmp_path / ".chaosrun", "used", "PASS")
        run_of(tmp_path / ".chaosrun", "waiting", None, reference=str(used.path.resolve()))
        options: dict[str, Any] = {"older_than_s": 0.0, "keep": 0, "failed": False, "agreed": lambda _: True}
        assert clean(None if where is None else Path(where), **options).empty
        assert used.run_json.is_file()

    def test_two_at_once(self, root: Path) -> None:
        run_of(root, "a", "PASS")
        with pytest.raises(UsageError, match="is being cleaned by process"):
            cleaned(root, agreed=lambda _: cleaned(root).done)

    def test_a_root_that_is_not_there(self, root: Path) -> None:
        assert cleaned(root).empty
        assert not root.exists()

    def test_references_that_nobody_used_for_long(self, root: Path) -> None:
        for name, age_s in (("old", OLD_S), ("new", 60.0)):
            path = root / "references" / name
            path.mkdir(parents=True)
            (path / "inputs.json").write_text("{}")
            age(path, age_s)
        assert [entry.name for entry in cleaned(root).choice.removed] == ["old"]
        assert {name for name in os.listdir(root / "references") if not name.startswith(".")} == {"new"}

    def test_what_is_not_ours_stays(self, root: Path, tmp_path: Path) -> None:
        """Folders without a run.json, links, files."""
        run_of(root, "a", "PASS")
        outside = run_of(tmp_path / "other", "b", "PASS")
        (root / "runs" / "notes").mkdir()
        (root / "runs" / "link").symlink_to(outside.path)
        (root / "sweeps" / "x").mkdir(parents=True)
        (root / "mine.txt").touch()
        cleaned(root, older_than_s=0.0, failed=True)
        assert outside.run_json.is_file()
        assert {"runs/notes", "runs/link", "sweeps/x", "mine.txt"} <= everything(root)
        assert [run.run_id for run in list_runs(root) if not run.path.is_symlink()] == []

    def test_leaves_what_is_just_begun(self, root: Path) -> None:
        run = run_of(root, "a", None)
        info = json.loads(run.run_json.read_text())
        run.run_json.write_text(json.dumps({**info, "created_s": time.time()}))
        assert cleaned(root, older_than_s=0.0, failed=True).empty
        run.supervisor_json.write_text("{}")
        assert cleaned(root, older_than_s=0.0, failed=True).done

    @pytest.mark.parametrize("early", [True, False])
    def test_leaves_what_came_to_be_something_else_while_it_asked(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, early: bool
    ) -> None:
        """Before the answer, or between the answer and its turn."""
        run = run_of(root, "a", None)

        def gone_on_with(_: object) -> Any:
            run.verdict_json.write_text(json.dumps({"status": "FAIL", "outcome": "completed"}))
            return True

        if not early:
            hold = cleaning._held
            monkeypatch.setattr(cleaning, "_held", lambda root, found: gone_on_with(0) and hold(root, found))
        done = cleaned(root, failed=True, agreed=gone_on_with if early else lambda _: True)
        assert [kept.why for kept in done.choice.kept] == ["used meanwhile"] and not done.choice.removed
        assert run.verdict_json.is_file()


class TestLinks:
    """A root that came from elsewhere holds links: what they lead to stays, and what is removed is the link."""

    @pytest.fixture
    def other(self, tmp_path: Path) -> RunLayout:
        return run_of(tmp_path / "other", "b", "PASS", storage="big")

    @pytest.mark.parametrize("kind", ["sweep", "suite"])
    def test_in_place_of_the_runs_of_a_sweep(self, root: Path, other: RunLayout, kind: str) -> None:
        folder = root / f"{kind}s" / "evil"
        folder.mkdir(parents=True)
        (folder / f"{kind}.json").write_text("{}")
        age(folder / f"{kind}.json", OLD_S)
        (folder / "runs").symlink_to(other.path.parent)
        before = everything(other.path)
        assert [found.storage for found in inventory_of(root)] == [Storage()]
        assert cleaned(root, failed=True).done
        assert not folder.exists() and everything(other.path) == before

    def test_runs_of_a_run(self, root: Path, other: RunLayout) -> None:
        run = run_of(root, "a", "PASS")
        (run.path / "runs").symlink_to(other.path.parent)
        assert cleaned(root).done
        assert other.run_json.is_file()

    @pytest.mark.parametrize("kind", ["run", "sweep", "suite"])
    def test_in_the_trash(self, root: Path, other: RunLayout, kind: str) -> None:
        trash = root / f"{kind}s" / ".trash"
        (trash / f"{kind}-1").mkdir(parents=True)
        (trash / f"{kind}-1" / "x").symlink_to(other.path if kind == "run" else other.path.parent.parent)
        (trash / f"{kind}-2").symlink_to(other.path.parent.parent)
        before = everything(other.path)
        done = cleaned(root)
        assert (done.leftovers, done.leftover_bytes) == (2, 0)
        assert everything(other.path) == before and not trash.exists()

    @pytest.mark.parametrize("name", ["runs", "runs/.trash", "sweeps", "suites/.trash"])
    def test_in_place_of_a_folder(self, root: Path, other: RunLayout, name: str) -> None:
        (root / name).parent.mkdir(parents=True)
        (root / name).symlink_to(other.path.parent)
        before = everything(other.path)
        with pytest.raises(UsageError, match="is a symbolic link: nothing is removed through it"):
            cleaned(root)
        assert everything(other.path) == before

    def test_in_place_of_the_lock(self, root: Path, tmp_path: Path) -> None:
        (run_of(root, "a", "PASS").path / "lock").symlink_to(tmp_path / "precious")
        (tmp_path / "precious").write_text("x")
        done = cleaned(root)
        assert "is a link" in done.choice.kept[0].why and (tmp_path / "precious").read_text() == "x"


class TestStorage:
    """Checkpoints outside go with the very run that made them."""

    def checkpoints(self, folder: Path) -> int:
        return len(list(folder.rglob("model.safetensors")))

    def test_a_copied_root_leaves_the_originals(self, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = run_of(root, "a", "PASS", storage="big")
        shutil.copytree(root, tmp_path / "copy")
        done = cleaned(tmp_path / "copy")
        big = tmp_path / "big" / run.run_id
        assert not (tmp_path / "copy" / "runs" / run.run_id).exists() and self.checkpoints(big) == 2
        assert done.to_json()["spared"] == [str(big / "reference"), str(big / "chaos")]
        shutil.copytree(root, tmp_path / "another")
        assert cli.main(["clean", "--root", str(tmp_path / "another"), "--yes"]) == 0
        assert f"kept      {big / 'chaos'}: these checkpoints may belong to another run" in capsys.readouterr().out
        assert cleaned(root).spared == () and not big.exists()

    @pytest.mark.parametrize("owner", [None, "", "{}", '{"v": 1, "run": "{run}", "nonce": "0"}', "link"])
    def test_without_the_word_of_its_owner_they_stay(self, root: Path, tmp_path: Path, owner: str | None) -> None:
        """Runs of before it was written, too."""
        run = run_of(root, "a", "PASS", storage="big")
        word = tmp_path / "big" / run.run_id / "owner.json"
        text = word.read_text()
        word.unlink()
        if owner == "link":
            (tmp_path / "owner.json").write_text(text)
            word.symlink_to(tmp_path / "owner.json")
        elif owner is not None:
            word.write_text(owner.replace("{run}", str(run.path)))
        assert cleaned(root).done and not run.path.exists()
        assert self.checkpoints(tmp_path / "big") == 2

    @pytest.mark.parametrize("kind", ["sweep", "suite"])
    def test_of_the_runs_of_a_sweep(self, root: Path, tmp_path: Path, kind: str) -> None:
        folder = root / f"{kind}s" / "s"
        run = run_of(folder, "a", "PASS", storage=str(tmp_path / "big"))
        (folder / f"{kind}.json").write_text("{}")
        age(folder / f"{kind}.json", OLD_S)
        assert self.checkpoints(tmp_path / "big" / run.run_id) == 2
        assert cleaned(root, failed=True).spared == ()
        assert not folder.exists() and os.listdir(tmp_path / "big") == []

    @pytest.mark.parametrize("copied", [False, True])
    def test_of_a_drill_that_leaves_nothing_behind(self, root: Path, tmp_path: Path, copied: bool) -> None:
        run = run_of(root, "a", "PASS", storage="big")
        if copied:
            shutil.copytree(root, tmp_path / "copy")
            run = RunLayout(tmp_path / "copy" / "runs" / run.run_id)
        remove_run(run)
        assert not run.path.exists() and self.checkpoints(tmp_path / "big") == (2 if copied else 0)


class TestDamaged:
    """run.json may say anything: what it names is removed only where this very run made it."""

    @pytest.mark.parametrize(
        "storage",
        ["{tmp}/precious", "{tmp}/precious/chaos", "/", "{tmp}/other/{run}/chaos/..", "relative/{run}/chaos", "", 7, ["x"]],
    )
    def test_a_storage_that_is_not_its_own_stays(self, root: Path, tmp_path: Path, storage: Any) -> None:
        run = run_of(root, "a", "PASS")
        for name in ("precious/chaos", f"other/{run.run_id}/chaos", f"relative/{run.run_id}/chaos"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "data").write_text("precious")
        info = json.loads(run.run_json.read_text())
        named = storage.format(tmp=tmp_path, run=run.run_id) if isinstance(storage, str) else storage
        run.run_json.write_text(json.dumps({**info, "storage": {"chaos": named}}))
        cleaned(root, failed=True, older_than_s=0.0)
        assert len(list(tmp_path.rglob("data"))) == 3
        assert not run.path.exists()

    def test_a_place_that_holds_more_than_checkpoints_stays(self, root: Path, tmp_path: Path) -> None:
        run = run_of(root, "a", "PASS", storage="big")
        (tmp_path / "big" / run.run_id / "chaos" / "thesis.tex").touch()
        cleaned(root)
        assert not run.path.exists()
        assert (tmp_path / "big" / run.run_id / "chaos" / "checkpoints").is_dir()
        assert not (tmp_path / "big" / run.run_id / "reference").exists()

    def test_a_storage_behind_a_link_stays(self, root: Path, tmp_path: Path) -> None:
        run = run_of(root, "a", "PASS", storage="big")
        place = tmp_path / "big" / run.run_id / "chaos"
        shutil.move(place / "checkpoints", tmp_path / "precious")
        (place / "checkpoints").symlink_to(tmp_path / "precious")
        cleaned(root)
        assert (tmp_path / "precious" / "step-00000005" / "model.safetensors").is_file()

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run_id": 7}'])
    def test_a_damaged_run_goes_only_when_asked_for(self, root: Path, text: str) -> None:
        run = run_of(root, "a", "PASS")
        run.run_json.write_text(text)
        age(run.run_json, OLD_S)
        assert cleaned(root).empty
        assert cleaned(root, failed=True).done
        assert not run.path.exists()

    def test_a_copied_run_leaves_the_checkpoints_of_the_first(self, root: Path, tmp_path: Path) -> None:
        run = run_of(root, "a", "PASS", storage="big")
        shutil.copytree(run.path, root / "runs" / "copy")
        age(root / "runs" / "copy" / "run.json", OLD_S)
        kept = run.path.rename(tmp_path / "kept")
        assert [entry.status for entry in inventory_of(root)] == ["damaged"]
        cleaned(root, failed=True)
        assert kept.is_dir() and len(list((tmp_path / "big").rglob("model.safetensors"))) == 2


class TestInterrupted:
    @pytest.mark.parametrize("at", range(4))
    def test_no_half_run_looks_whole_and_the_next_one_ends_it(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
    ) -> None:
        """Ctrl-C at each of its removals."""
        run_of(root, "a", "PASS", storage="big")
        calls = []

        def interrupted(path: Path) -> None:
            calls.append(path)
            if len(calls) > at:
                raise KeyboardInterrupt
            shutil.rmtree(path)

        with monkeypatch.context() as patched:
            patched.setattr(cleaning.shutil, "rmtree", interrupted)
            with pytest.raises(KeyboardInterrupt):
                # As rmtree is interrupted: some files are gone, the rest is there.
                cleaned(root)
        assert list_runs(root) == []
        done = cleaned(root)
        assert done.done and done.leftovers == 1
        assert list(tmp_path.rglob("model.safetensors")) == []
        assert os.listdir(tmp_path / "big") == []
        assert cleaned(root).empty

    def test_what_cannot_be_removed_is_said(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run_of(root, "a", "PASS")

        def refused(path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(cleaning.shutil, "rmtree", refused)
            with pytest.raises(ResourcesError, match="cannot be removed: Permission denied"):
                cleaned(root)
        assert cleaned(root).leftovers == 1


class TestCommand:
    def test_asks_nobody_where_there_is_none(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = run_of(root, "a", "PASS")
        monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
        assert cli.main(["clean", "--root", str(root)]) == 2
        told = capsys.readouterr().err
        assert "1 run" in told and "--yes" in told
        assert run.path.is_dir()
        assert cli.main(["clean", "--root", str(root), "--dry-run", "-o", "json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["v"], told["done"], told["removed"][0]["name"]) == (1, False, run.run_id)
        assert cli.main(["clean", "--root", str(root), "--older-than", "60d", "--yes"]) == 0
        assert "nothing to remove" in capsys.readouterr().out
        assert cli.main(["clean", "--root", str(root), "--yes"]) == 0
        out = capsys.readouterr().out
        assert run.run_id in out and "removed: 1 run, " in out
        assert not run.path.exists()

    @pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)])
    def test_asks_at_a_terminal(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, gone: bool
    ) -> None:
        import io

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        run = run_of(root, "a", "PASS")
        shown = Terminal()
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        monkeypatch.setattr("sys.stderr", shown)
        assert cli.main(["clean", "--root", str(root)]) == 0
        assert run.run_id in shown.getvalue() and shown.getvalue().endswith("Remove it? [y/N] ")
        assert run.path.exists() != gone
        out = capsys.readouterr().out
        assert out.startswith("removed: 1 run, ") if gone else out == "nothing was removed\n"

    @pytest.mark.parametrize("options", [["--older-than", "soon"], ["--older-than", "0"], ["--keep", "-1"]])
    def test_wrong_options(self, root: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["clean", "--root", str(root), *options]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("hint: ")
