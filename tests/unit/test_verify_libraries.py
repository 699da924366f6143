"""What a script's libraries have to do with a difference: known bugs where all fits them, and what their users can do."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from legs import Bugs, edit_trace, only
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.faults.fault import Fault
from chaosrun.observe import environment
from chaosrun.records.events import FaultObserved
from chaosrun.records.layout import RunLayout
from chaosrun.verify.codes import Cause
from chaosrun.verify.libraries import KNOWN
from chaosrun.verify.verdict import Verdict, judge, judge_drill
from tests.records import read_lines, write_lines
from tests.unit.test_verify_checks import load

LATER = (Fault(id="F1", rank=1, phase="step", at_step=10, source="faults.schedule[0]"),)
"""Goes on from step 8, six batches into the second epoch."""
EARLY = SCRIPT_KILLS[:1]
"""Goes on from step 4, eight batches into the first."""
TRAINER = {"transformers": "5.23.0", "accelerate": "1.15.0"}


def judged(root: Path, libraries: dict[str, str], bugs: Bugs, kills: tuple[Fault, ...] = LATER, **about: Any) -> Verdict:
    return judge(write_script_run(root, bugs=bugs, libraries=libraries, kills=kills, **about))


@pytest.mark.parametrize(
    ("libraries", "whose"),
    [
        ({"accelerate": "1.14.0"}, "library"),
        ({"accelerate": "1.15.0"}, "yours"),
        ({"torch": "2.13.0"}, "yours"),
        ({"accelerate": "1.14.0", "transformers": "4.57.6"}, "library"),
        ({"lightning-fabric": "2.6.6"}, "library"),
        ({"lightning": "2.6.6"}, "yours"),
    ],
)
def test_a_library_is_named_where_its_release_has_the_bug(tmp_path: Path, libraries: dict[str, str], whose: str) -> None:
    verdict = judged(tmp_path, libraries, Bugs(set_epoch=False))
    assert (verdict.code, verdict.blame.whose) == ("sampler_epoch_not_set", whose), verdict.cause
    named = next((f"{name} {version}: " for name, version in reversed(libraries.items())), "")
    assert (named in verdict.cause) == (whose == "library")
    assert (named in f"{verdict.hint}") == (whose == "library")
    assert verdict.blame.likely, "the records point there, and do not prove it"


def test_fabric_is_not_named_of_one_rank_which_has_no_sampler_with_an_epoch(tmp_path: Path) -> None:
    kills = (Fault(id="F1", rank=0, phase="step", at_step=10, source="faults.schedule[0]"),)
    verdict = judged(tmp_path, {"lightning-fabric": "2.6.6"}, Bugs(set_epoch=False), kills, workers=1)
    assert (verdict.code, verdict.blame.whose) == ("sampler_epoch_not_set", "yours"), verdict.cause


def test_fabric_is_known_by_an_object_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fabric:
        pass

    modules = {"lightning_fabric": {"__version__": "2.6.6"}, "lightning_fabric.fabric": {"Fabric": Fabric}}
    for name, held in modules.items():
        monkeypatch.setitem(sys.modules, name, cast(ModuleType, SimpleNamespace(**held)))
    assert "lightning-fabric" not in environment.libraries()
    fabric = Fabric()
    assert environment.libraries().get("lightning-fabric") == "2.6.6" and fabric


@pytest.mark.parametrize(
    ("bugs", "whose"),
    [
        (Bugs(set_epoch=False, skip_off=-6, with_ids=False), "library"),
        (Bugs(set_epoch=False, skip_off=-6), "yours"),
        (Bugs(set_epoch=False, with_ids=False), "yours"),
        (Bugs(skip_off=-6, with_ids=False), "yours"),
    ],
    ids=["a stream", "samples with indices", "not the beginning", "the beginning of the second pass"],
)
def test_trainer_is_named_for_a_stream_that_begins_at_its_beginning(tmp_path: Path, bugs: Bugs, whose: str) -> None:
    verdict = judged(tmp_path, TRAINER, bugs)
    assert (verdict.status, verdict.blame.whose) == ("FAIL", whose), verdict.cause
    assert ("transformers#26413" in verdict.cause) == (whose == "library")


def of_optimizer(run: RunLayout, *, done: bool) -> None:
    """What was seen of the optimizer's file, in all attempts: nothing; `done`: not that its save at step 4 came to an end."""
    for leg, attempts in (("reference", 1), ("chaos", 1 if done else 2)):
        for attempt in range(1, attempts + 1):
            if leg == "chaos" or not done:
                gone = lambda line: None if "optimizer" in line["path"] and (line["done"] or not done) else line  # noqa: E731
                edit_trace(run, leg, attempt, 0, only("save", gone, step=4 if done else None))


@pytest.mark.parametrize("seen", ["lost", "whole", "never"])
def test_trainer_is_named_for_an_optimizer_s_file_that_was_saved_and_is_gone(tmp_path: Path, seen: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_optimizer=False), libraries=TRAINER, kills=EARLY)
    if seen != "whole":
        of_optimizer(run, done=seen == "lost")
    verdict = judge(run)
    whose = "library" if seen == "lost" else "yours"
    assert (verdict.code, verdict.blame.whose) == ("optimizer_state_not_restored", whose), verdict.cause
    assert ("transformers#35782" in verdict.cause) == (seen == "lost")
    assert ("save_only_model=True" in f"{verdict.hint}") == (seen == "never")


def test_a_library_that_was_not_asked_to_resume_is_not_named(tmp_path: Path) -> None:
    """A script that loads the weights alone: there the data begin anew, too."""
    run = write_script_run(tmp_path, bugs=Bugs(keep_optimizer=False, skip_off=-4), libraries=TRAINER, kills=EARLY)
    of_optimizer(run, done=True)
    verdict = judge(run)
    assert (verdict.code, verdict.blame.whose) == ("optimizer_state_not_restored", "yours"), verdict.cause


def called(run: RunLayout, name: str) -> None:
    """The optimizer's file, or the model's, is called so in all attempts."""
    kind = "model" if "model" in name else "optimizer"
    for leg, attempts in (("reference", 1), ("chaos", 2)):
        for attempt in range(1, attempts + 1):
            renamed = lambda line: {**line, "path": line["path"].replace(f"{kind}.pt", name)}  # noqa: E731
            edit_trace(run, leg, attempt, 0, only("save", renamed))


@pytest.mark.parametrize(
    ("version", "name", "bugs", "named"),
    [
        ("1.0.1", "random_states_0.pkl", Bugs(keep_rng=False), "torch 2.6"),
        ("1.1.0", "random_states_0.pkl", Bugs(keep_rng=False), ""),
        ("1.0.1", "states.pkl", Bugs(keep_rng=False), ""),
        ("1.0.1", "random_states_0.pkl", Bugs(keep_rng=False, keep_optimizer=False), ""),
        ("1.15.0", "random_states_0.pkl", Bugs(keep_rng=False), "missing"),
    ],
    ids=["refused", "mended", "others", "not alone", "missing"],
)
def test_accelerate_is_named_for_random_states_that_it_passes_over(
    tmp_path: Path, version: str, name: str, bugs: Bugs, named: str
) -> None:
    run = write_script_run(tmp_path, bugs=bugs, libraries={"accelerate": version}, kills=EARLY)
    called(run, name)
    if named == "missing":
        edit_trace(run, "chaos", 1, 0, only("save", lambda line: None if "random" in line["path"] else line, step=4))
    verdict = judge(run)
    assert (verdict.status, "accelerate#4283" in verdict.cause) == ("FAIL", bool(named)), verdict.cause
    assert verdict.blame.whose == ("library" if named else "yours") and named in verdict.cause


@pytest.mark.parametrize(
    ("damaged", "torn_later", "named"),
    [
        (None, False, False),
        ("checkpoint/model.pt", False, False),
        ("checkpoint/random_states_0.pkl", False, True),
        (None, True, True),
    ],
    ids=["of a step alone", "another file", "this file", "cut off while it was written anew"],
)
def test_accelerate_is_named_only_where_a_fault_hit_the_random_states(
    tmp_path: Path, damaged: str | None, torn_later: bool, named: bool
) -> None:
    fault = Fault(id="F1", kind="truncate", rank=1, phase="save", at_step=4, source="faults.schedule[0]")
    kills = (replace(EARLY[0], id="F2"),)
    run = write_script_run(tmp_path, bugs=Bugs(keep_rng=False), libraries={"accelerate": "1.15.0"}, kills=kills)
    called(run, "random_states_0.pkl")
    if torn_later:

        def again(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            last = max(at for at, line in enumerate(lines) if line["kind"] == "save" and "random" in line["path"])
            return [*lines[: last + 1], {**lines[last], "step": 5, "done": False}, *lines[last + 1 :]]

        path = run.leg("chaos").attempt(1).trace(0)
        write_lines(path, again([*read_lines(path)]))
    drill = load(run)
    plan = replace(drill.plan, faults=(*drill.plan.faults, fault))
    about = {"fault": "F1", "attempt": 1, "rank": 1, "pid": 7, "how": "note"}
    seen = FaultObserved(**cast(Any, about), time_s=1.0, found={"file": damaged})
    *events, finished = drill.chaos.journal
    verdict = judge_drill(replace(drill, plan=plan, chaos=replace(drill.chaos, journal=(*events, seen, finished))))
    assert verdict.code == "rng_not_restored", verdict.cause
    assert ("accelerate#4283" in verdict.cause) == named, verdict.cause


@pytest.mark.parametrize("whole", [True, False])
def test_random_states_are_whole_only_where_those_of_each_rank_are(tmp_path: Path, whole: bool) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_rng=False), libraries={"accelerate": "1.15.0"}, kills=EARLY)
    called(run, "random_states_0.pkl")
    for leg in ("reference", "chaos"):
        first, second = (run.leg(leg).attempt(1).trace(rank) for rank in (0, 1))
        own = [line for line in read_lines(first) if line["kind"] == "save" and "random" in line["path"]]
        own = [{**line, "path": line["path"].replace("states_0", "states_1")} for line in own]
        cut_off = [line for line in own if leg == "reference" or whole or not (line["done"] and line["step"] == 4)]
        write_lines(second, [*read_lines(second), *cut_off])
    verdict = judge(run)
    assert verdict.code == "rng_not_restored", verdict.cause
    assert ("accelerate#4283" in verdict.cause) == (not whole), verdict.cause


@pytest.mark.parametrize(
    ("version", "name", "whose"),
    [
        ("0.31.0", "diffusion_pytorch_model.safetensors", "library"),
        ("0.32.0", "diffusion_pytorch_model.safetensors", "yours"),
        ("0.31.0", "model_average.pt", "yours"),
    ],
)
def test_diffusers_is_named_for_an_average_that_it_saved(tmp_path: Path, version: str, name: str, whose: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_registered=False), libraries={"diffusers": version}, kills=EARLY)
    called(run, name)
    verdict = judge(run)
    assert (verdict.code, verdict.blame.whose) == ("kept_state_not_restored", whose), verdict.cause
    assert ("diffusers#9764" in verdict.cause) == (whose == "library")


@pytest.mark.parametrize(("off", "whose"), [(-2, "library"), (-8, "yours")])
def test_a_loader_that_goes_back_is_not_one_that_begins_anew(tmp_path: Path, off: int, whose: str) -> None:
    verdict = judged(tmp_path, {"accelerate": "1.12.0", "torchdata": "0.11.0"}, Bugs(skip_off=off), EARLY)
    assert (verdict.code, verdict.blame.whose) == ("batches_repeated", whose), verdict.cause


@pytest.mark.parametrize(("with_ids", "off", "whose"), [(False, 2, "library"), (True, 2, "yours"), (False, -2, "yours")])
def test_datasets_is_named_for_streams_that_skip(tmp_path: Path, with_ids: bool, off: int, whose: str) -> None:
    verdict = judged(tmp_path, {"datasets": "5.0.0"}, Bugs(skip_off=off, with_ids=with_ids), EARLY)
    assert (verdict.status, verdict.blame.whose) == ("FAIL", whose), verdict.cause
    assert ("datasets#8360" in verdict.cause) == (whose == "library")


@pytest.mark.parametrize(("version", "named"), [("3.3.2", True), ("3.4.0", False)])
def test_datasets_is_not_named_of_later_passes_for_what_it_skips_at_once(tmp_path: Path, version: str, named: bool) -> None:
    """`map()` and `filter()`, which later releases mend, lose rows as the restart goes on."""
    libraries = {"datasets": version, "torchdata": "0.11.0"}
    verdict = judged(tmp_path, libraries, Bugs(each_pass=True, with_ids=False), EARLY)
    assert (verdict.status, verdict.code) == ("FAIL", "batches_skipped"), verdict.cause
    assert "only in the pass in which the checkpoint was saved" in f"{verdict.hint}"
    assert "count of batches to skip" not in f"{verdict.hint}"
    assert ("datasets#7447" in verdict.cause) == named and "datasets#8" not in verdict.cause


@pytest.mark.parametrize("aside", [True, False])
def test_what_one_thread_saves_is_no_save_in_the_background(tmp_path: Path, aside: bool) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-2), libraries={"pytorch-lightning": "2.5.3"}, kills=EARLY)
    edit_trace(run, "chaos", 1, 0, only("save", lambda line: {**line, "path": "step=3.ckpt", "aside": aside}))
    assert ("Lightning#20953" in judge(run).cause) == aside


def test_a_library_is_not_named_for_what_it_does_not_do(tmp_path: Path) -> None:
    libraries = {"accelerate": "1.12.0", "torchdata": "0.11.0", "datasets": "4.8.4", "pytorch-lightning": "2.5.3"}
    verdict = judged(tmp_path, libraries, Bugs(keep_rng=False), SCRIPT_KILLS)
    assert (verdict.code, verdict.blame.whose) == ("rng_not_restored", "yours")
    assert all(bug.thread not in verdict.cause for bug in KNOWN)


@pytest.mark.parametrize(
    ("libraries", "bugs", "told"),
    [
        ({"accelerate": "1.15.0"}, Bugs(set_epoch=False), "DataLoaderConfiguration(use_seedable_sampler=True)"),
        ({}, Bugs(set_epoch=False), "a sampler that has set_epoch (DistributedSampler) needs it called every epoch"),
        ({"lightning-fabric": "2.6.6"}, Bugs(set_epoch=False), "loader._num_iter_calls = epoch"),
        (TRAINER, Bugs(set_epoch=False), "Trainer sets the epoch where the sampler has one"),
        (TRAINER, Bugs(skip_off=-6), "ignore_data_skip=True"),
        (TRAINER, Bugs(skip_off=-2), "off by -2"),
    ],
)
def test_hints_say_what_a_library_s_users_can_do(tmp_path: Path, libraries: dict[str, str], bugs: Bugs, told: str) -> None:
    verdict = judged(tmp_path, libraries, bugs)
    whose = "library" if "lightning-fabric" in libraries else "yours"
    assert told in f"{verdict.hint}" and verdict.blame.whose == whose


@pytest.mark.parametrize("keep_rng", [True, False])
def test_an_order_that_came_again_is_laid_to_the_random_streams_first_where_they_are_wrong(
    tmp_path: Path, keep_rng: bool
) -> None:
    verdict = judged(tmp_path, {}, Bugs(set_epoch=False, keep_rng=keep_rng))
    assert (verdict.code, verdict.headline) == ("sampler_epoch_not_set", "an earlier epoch's order again")
    hint = f"{verdict.hint}"
    assert "those of epoch 0" in hint and "counts its own passes" in hint and "a loader with a state_dict" in hint
    assert (hint.index("set_epoch") < hint.index("torch.get_rng_state")) == keep_rng
    assert ("the random streams are not where they should be" in hint) == (not keep_rng)
    verdict = judged(tmp_path / "accelerate", {"accelerate": "1.15.0"}, Bugs(set_epoch=False, keep_rng=keep_rng))
    assert verdict.headline == "sampler epoch not set", "accelerate's has one"
    hint = f"{verdict.hint}"
    assert "use_seedable_sampler=True" in hint and ("torch.get_rng_state" in hint) == (not keep_rng), hint


def test_an_order_that_came_early_is_not_laid_to_epochs_alone() -> None:
    about = {"epoch": 2, "where": "at the same place", "expected": 1, "by": "script"}
    cause = Cause("sampler_epoch_ahead", about)
    assert cause.sentence == "a later epoch's order"
    assert "epochs were counted twice, or the random stream" in f"{cause.hint}"


@pytest.mark.parametrize("right", [False, True])
def test_a_rank_whose_batches_differ_without_ids_is_not_told_as_right(tmp_path: Path, right: bool) -> None:
    """As where rank 0's loader hands out the batches of all; and one rank of which its batches show that it is right."""
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-2), kills=EARLY)
    for rank in (1, 2):
        for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
            edit_trace(run, leg, attempt, rank, only("step", lambda line: {**line, "ids": None}))
    if right:
        known = {
            line["step"]: line["batch"]
            for line in read_lines(run.leg("reference").attempt(1).trace(2))
            if line["kind"] == "step"
        }
        edit_trace(run, "chaos", 2, 2, only("step", lambda line: {**line, "batch": known[line["step"]]}))
    verdict = judge(run)
    assert verdict.code == "batches_repeated" and verdict.divergence is not None, verdict.cause
    assert verdict.divergence.ranks == ((0, 1) if right else (0, 1, 2))
    assert ("rank 2 resumed at the right place in the data, ranks 0 and 1 at a wrong one" in f"{verdict.hint}") == right, (
        verdict.hint
    )
    assert ("resumed at the right place" in f"{verdict.hint}") == right
