"""JobSpec on its own: defaults, bounds, durations, rules between fields, and the way through JSON."""

import pytest
from pydantic import ValidationError

from chaosrun.spec.faults import RandomFaults, ScheduledFault
from chaosrun.spec.model import JobSpec, Tolerance

LEAST = {"name": "probe", "script": "train.py", "workers": 2}


def job(**fields):
    return JobSpec.model_validate({**LEAST, **fields})


def error_locations(**fields):
    with pytest.raises(ValidationError) as caught:
        job(**fields)
    return [entry["loc"] for entry in caught.value.errors()]


def test_three_keys_are_enough_and_the_rest_has_defaults():
    spec = job()
    assert (spec.seed, spec.deterministic, spec.max_steps, spec.timeout) == (0, "strict", None, None)
    assert (spec.per_worker.cpu, spec.per_worker.gpu, spec.threads) == (1.0, "auto", 1)
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep, spec.checkpoint.storage) == (50, 3, None)
    assert (spec.faults.seed, spec.faults.schedule, spec.faults.random) == (0, (), None)
    assert (spec.recovery.max_restarts, spec.recovery.acquire_timeout, spec.recovery.backoff) == (3, 60.0, 1.0)
    assert (spec.recovery.hang_timeout, spec.recovery.start_timeout) == (None, 300.0)
    assert spec.verify.losses.exact and spec.verify.weights.exact and spec.verify.confirm


def test_each_of_the_three_is_required():
    for name in LEAST:
        with pytest.raises(ValidationError, match=name):
            JobSpec.model_validate({key: value for key, value in LEAST.items() if key != name})


def test_a_spec_survives_json():
    spec = job(
        args=["--lr", "0.10"],
        env={"A": "1"},
        timeout="2h",
        max_steps=60,
        faults={"schedule": [{"at_step": 7, "rank": 1}, {"every_steps": 5}], "random": {"count": 2, "between": [3, 9]}},
    )
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_a_spec_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        job().workers = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(90, 90.0), (0.5, 0.5), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("1.5h", 5400.0), ("500ms", 0.5), ("1d", 86400.0)],
)
def test_durations(written, seconds):
    assert job(timeout=written).timeout == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["soon", "10", "", "-5s", 0, -1, True, float("inf"), float("nan"), [1], "1 fortnight", "0s"]
)
def test_what_is_not_a_duration(written):
    assert error_locations(timeout=written) == [("timeout",)]


@pytest.mark.parametrize(
    ("fields", "location"),
    [
        ({"workers": 0}, ("workers",)),
        ({"workers": True}, ("workers",)),
        ({"workers": 2.0}, ("workers",)),
        ({"workers": "2"}, ("workers",)),
        ({"seed": -1}, ("seed",)),
        ({"seed": 2**32}, ("seed",)),
        ({"name": "a/b"}, ("name",)),
        ({"name": ".hidden"}, ("name",)),
        ({"name": "x" * 65}, ("name",)),
        ({"script": ""}, ("script",)),
        ({"args": "--lr"}, ("args",)),
        ({"args": {"lr": "1"}}, ("args",)),
        ({"env": {"A=B": "1"}}, ("env", "A=B", "[key]")),
        ({"env": {"MASTER_PORT": "1"}}, ("env", "MASTER_PORT", "[key]")),
        ({"deterministic": False}, ("deterministic",)),
        ({"max_steps": 0}, ("max_steps",)),
        ({"per_worker": {"cpu": 0}}, ("per_worker", "cpu")),
        ({"per_worker": {"gpu": -1}}, ("per_worker", "gpu")),
        ({"per_worker": {"gpu": True}}, ("per_worker", "gpu")),
        ({"checkpoint": {"keep": 1}}, ("checkpoint", "keep")),
        ({"checkpoint": {"every_steps": 0}}, ("checkpoint", "every_steps")),
        ({"checkpoint": None}, ("checkpoint",)),
        ({"data": {"resume": "sometimes"}}, ("data", "resume")),
        ({"verify": {"losses": {"atol": -1e-9}}}, ("verify", "losses", "atol")),
        ({"verify": {"losses": {"rtol": float("nan")}}}, ("verify", "losses", "rtol")),
        ({"verify": {"confirm": -1}}, ("verify", "confirm")),
        ({"verify": {"confirm": 1.0}}, ("verify", "confirm")),
        ({"recovery": {"max_restarts": -1}}, ("recovery", "max_restarts")),
        ({"faults": {"schedule": [{"at_step": 1, "rank": -1}]}}, ("faults", "schedule", 0, "rank")),
        ({"faults": {"schedule": [{"at_step": 1, "rank": 1.0}]}}, ("faults", "schedule", 0, "rank")),
        ({"faults": {"schedule": [{"at_step": 0}]}}, ("faults", "schedule", 0, "at_step")),
        ({"faults": {"random": {"count": 1, "between": [1, 2, 3]}}}, ("faults", "random", "between")),
        ({"faults": {"random": {"mean_steps": 0.5}}}, ("faults", "random", "mean_steps")),
        ({"surprise": 1}, ("surprise",)),
    ],
)
def test_wrong_values_are_found_where_they_are(fields, location):
    assert error_locations(**fields) == [location]


@pytest.mark.parametrize(
    ("entry", "keys"),
    [
        ({"at_step": 3, "every_steps": 5}, ["every_steps"]),
        ({"at_step": 3, "until_step": 9}, ["until_step"]),
        ({"every_steps": 9, "until_step": 3}, ["until_step"]),
        ({"every_steps": 9, "phase": "restore.end"}, ["every_steps"]),
        ({"until_step": 9}, ["until_step", None]),
        ({}, [None]),
        ({"phase": "reduce"}, [None]),
        ({"phase": "save", "at_step": 3, "file": "*.pt", "operation": 1}, ["operation"]),
    ],
)
def test_triggers_that_contradict_each_other(entry, keys):
    here = ("faults", "schedule", 0)
    assert error_locations(faults={"schedule": [entry]}) == [here if key is None else (*here, key) for key in keys]


def test_the_second_operation_on_a_file_can_be_struck():
    assert ScheduledFault.model_validate({"phase": "save", "at_step": 3, "file": "*.pt", "operation": 2}).operation == 2


@pytest.mark.parametrize("phase", ["checkpoint.file", "checkpoint.precommit", "checkpoint.postcommit", "restore.end"])
def test_other_phases_need_no_step(phase):
    assert ScheduledFault.model_validate({"phase": phase}).at_step is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"count": 3, "mean_steps": 4}, "exclude each other"),
        ({}, "need count, mean_steps, rate or mtbf"),
        ({"count": 1, "between": [9, 2]}, "no step lies between"),
    ],
)
def test_random_faults_need_one_amount(entry, message):
    with pytest.raises(ValidationError, match=message):
        RandomFaults.model_validate(entry)


def test_threads_are_whole_cores_and_at_least_one():
    assert [job(per_worker={"cpu": cpu}).threads for cpu in (0.25, 1, 2.5, 4)] == [1, 1, 2, 4]


def test_any_tolerance_is_not_exact():
    assert not Tolerance(rtol=1e-6).exact
    assert not Tolerance(atol=1e-6).exact


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"script": None}, "a job needs a script, a module or a command"),
        ({"module": "package.train"}, "script and module exclude each other"),
        ({"script": None, "module": "train", "command": ["torchrun", "train.py"]}, "module and command exclude each other"),
        ({"script": None, "module": "train", "resume": {"by": "chaosrun"}}, "resume.by: chaosrun needs a script, not a module"),
    ],
)
def test_one_way_to_train(fields, said):
    with pytest.raises(ValidationError) as caught:
        job(**fields)
    assert said in str(caught.value)


def test_who_resumes():
    assert [job(resume={"by": by}).by for by in ("auto", "chaosrun", "script")] == ["chaosrun", "chaosrun", "script"]
    assert job(script=None, command=["torchrun", "train.py"]).by == "script"
