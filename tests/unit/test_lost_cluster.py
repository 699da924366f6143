"""A run whose cluster cannot be joined is removed only while there is nothing to continue."""

from pathlib import Path

import pytest
from run_files import write_info

from chaosrun.errors import NoClusterError, ResourcesError
from chaosrun.records.layout import RunLayout
from chaosrun.supervise import run as supervise_run
from chaosrun.supervise.interrupts import Interrupts


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_has_begun_outlives_the_head_of_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    run = RunLayout(tmp_path / "runs" / "toy")
    run.path.mkdir(parents=True)
    write_info(run, kind="run")

    def supervise(*_: object) -> None:
        if begun:
            run.leg("run").path.mkdir()
            run.leg("run").journal.write_text("")
        raise NoClusterError("no Ray cluster at 10.0.0.1:6379: Connection refused")

    monkeypatch.setattr(supervise_run, "_in_a_process", supervise)
    # Whichever Ray other tests of this process have joined.
    monkeypatch.setattr(supervise_run, "expected_ray", lambda _: "joined")
    with pytest.raises(ResourcesError, match=r"10\.0\.0\.1") as caught:
        supervise_run.carry_out(run, tmp_path, "10.0.0.1:6379", lambda _: None, Interrupts())
    assert run.run_json.exists() == begun == ("chaosrun resume" in (caught.value.hint or ""))
