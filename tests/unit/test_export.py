"""What `chaosrun export` writes: valid where it goes, right in its numbers, and whole whatever a file is called.

Scripts are run: with stand-ins for the programs that this machine lacks, which write down what they were asked.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chaosrun import cli
from chaosrun.errors import UsageError
from chaosrun.integrations.export import workflow
from chaosrun.spec.places import SourceText
from chaosrun.spec.tree import plain, read_tree
from tests.e2e.drills import eventually

ROOT = Path(__file__).parents[2]
PROBE = ROOT / "jobs" / "probe" / "job.yaml"
SUITE = ROOT / "configs" / "accumulation.yaml"
BIN = Path(sys.executable).parent
ODD = """o'dd $(touch oops) "x" `y` & ${{ z }}"""
"""A folder's name that means something to shells, to YAML and to GitHub."""


@pytest.fixture
def odd_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / "train.py").write_text("import chaosrun\n")
    job = folder / "job.yaml"
    job.write_text("name: odd\nscript: train.py\nworkers: 3\nper_worker: {cpu: 1.5, gpu: 1}\ntimeout: 30m\n")
    monkeypatch.chdir(tmp_path)
    return job


@pytest.fixture
def exported(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str | Path) -> str:
        assert cli.main(["export", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


def parsed(text: str) -> Any:
    tree, problems = read_tree(SourceText(label="exported", text=text))
    assert tree is not None and not problems
    return plain(tree)


def shellcheck(text: str, *options: str) -> str:
    command = [str(BIN / "shellcheck"), "--norc", "--exclude=SC2016", *options, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False).stdout


END_OF_CALL = "\x01"


def stand_ins(folder: Path, programs: Mapping[str, str]) -> dict[str, str]:
    """An environment in which these programs are shell scripts; each first writes down what it was called with."""
    folder.mkdir()
    record = folder / "told"
    for name, body in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\nprintf '%s\\0' {name} \"$@\" $'\\x01' >> '{record}'\n{body}\n")
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "TOLD": str(record)}


def told(environment: Mapping[str, str]) -> list[list[str]]:
    path = Path(environment["TOLD"])
    calls = path.read_text().split(f"{END_OF_CALL}\0")[:-1] if path.exists() else []
    return [call.split("\0")[:-1] for call in calls]


def valid_workflows(*paths: Path, kind: str = "workflows") -> str:
    """What is wrong with them, by the schema that comes with check-jsonschema. `kind`: workflows, or actions."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.github-{kind}", *map(str, paths)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=300, check=False)
    return "" if done.returncode == 0 else done.stdout or done.stderr


class TestGithub:
    def test_is_a_workflow(self, exported: Callable[..., str], tmp_path: Path) -> None:
        variants = ([PROBE], [SUITE], [SUITE, "--shards", "3"])
        paths = [tmp_path / f"{number}.yml" for number in range(len(variants))]
        for path, options in zip(paths, variants, strict=True):
            path.write_text(exported("github", *options))
        assert valid_workflows(*paths) == ""
        paths[0].write_text(paths[0].read_text().replace("runs-on:", "run-on:"))
        assert "runs-on" in valid_workflows(*paths), "the control was not seen"

    @pytest.mark.parametrize("options", [[PROBE], [SUITE, "--shards", "3"]])
    def test_its_commands_are_sound(self, exported: Callable[..., str], options: list[Any]) -> None:
        steps = parsed(exported("github", *options))["jobs"]["drill"]["steps"]
        scripts = [step["run"] for step in steps if "run" in step]
        assert len(scripts) >= 2
        for script in scripts:
            # GitHub puts its values in before a shell sees them.
            assert shellcheck(script.replace("${{ matrix.shard }}", "1"), "--shell=bash") == ""
        assert shellcheck("rm -r $x", "--shell=bash") != "", "the control was not seen"

    def test_permissions_and_versions(self, exported: Callable[..., str]) -> None:
        flow = parsed(exported("github", SUITE))
        steps = flow["jobs"]["drill"]["steps"]
        assert flow["permissions"] == {"contents": "read"}
        used = [step["uses"] for step in steps if "uses" in step]
        assert used and all(action.partition("@")[2].removeprefix("v").isdecimal() for action in used)
        kept = [step for step in steps if "cache/save" in step.get("uses", "") or "upload" in str(step)]
        assert [step["if"] for step in kept] == ["${{ always() }}"] * 2, "what a cancelled night leaves is kept, too"
        uploaded = next(step["with"] for step in kept if "upload" in step["uses"])
        assert uploaded["include-hidden-files"], "the folder of the runs begins with a dot"

    @pytest.mark.parametrize(
        ("event", "job", "suite"), [("pull_request", [], []), ("schedule", ["faults.seed="], ["--seed", "today"])]
    )
    def test_what_is_called(
        self, exported: Callable[..., str], odd_job: Path, tmp_path: Path, event: str, job: list[str], suite: list[str]
    ) -> None:
        (tmp_path / "suite.yaml").write_text(f"name: odd\njob: {json.dumps(f'{ODD}/job.yaml')}\ndrills: [{{name: a}}]\n")
        environment = stand_ins(tmp_path / "bin", {"chaosrun": ""})
        environment |= {"GITHUB_EVENT_NAME": event, "GITHUB_STEP_SUMMARY": "summary.md"}
        for options in ([odd_job], ["suite.yaml", "--shards", "2"]):
            steps = parsed(exported("github", *options))["jobs"]["drill"]["steps"]
            script = next(step["run"] for step in steps if step.get("name") == "Drill")
            # A cancelled job tells the process that it started, and no other.
            assert script.splitlines()[-1].startswith("exec chaosrun ")
            # What GitHub does with its expressions.
            script = script.replace("${{ '${{' }}", "${{").replace("${{ matrix.shard }}", "2")
            subprocess.run(["bash", "-eo", "pipefail", "-c", script], env=environment, cwd=tmp_path, timeout=300, check=True)
        called_job, called_suite = told(environment)
        assert called_job[:3] == ["chaosrun", "submit", f"{ODD}/job.yaml"]
        assert [word[: len("faults.seed=")] for word in called_job[3:]] == job
        assert called_suite == ["chaosrun", "suite", "suite.yaml", *suite, "--shard", "2/2", "--markdown", "summary.md"]
        assert not (tmp_path / "oops").exists()

    def test_one_line_of_a_name(self) -> None:
        with pytest.raises(UsageError, match="no script can quote"):
            workflow("jobs/two\nlines.yaml")


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def some(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    return {**some(**properties), "additionalProperties": False, "required": [*required]}


def every(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def rayjob() -> dict[str, Any]:
    """The fields used here, as KubeRay's helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml (version v1) has them; whole
    manifests were checked against that file when this was written."""
    mounts = every({"required": ["name", "mountPath"]})
    container = closed("name", name=TEXT, image=TEXT, resources={"type": "object"}, volumeMounts=mounts)
    volumes = every({"type": "object", "required": ["name"]})
    pod = closed("containers", securityContext=some(fsGroup=NUMBER), volumes=volumes, containers=every(container))
    group = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), NUMBER) | {
        "groupName": TEXT,
        "rayStartParams": {"type": "object", "additionalProperties": TEXT},
        "template": {**some(spec=pod), "required": ["spec"]},
    }
    workers = every(closed("groupName", "maxReplicas", "minReplicas", "template", **group))
    cluster = {"rayVersion": TEXT, "headGroupSpec": closed("template", **group), "workerGroupSpecs": workers}
    spec = dict.fromkeys(("ttlSecondsAfterFinished", "activeDeadlineSeconds"), NUMBER) | {
        "entrypoint": TEXT,
        "shutdownAfterJobFinishes": {"const": True},
        "backoffLimit": {"const": 0},
        "submitterConfig": some(backoffLimit={"const": 0}),
        "rayClusterSpec": closed("headGroupSpec", **cluster),
    }
    name = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}
    about = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayJob"}, "metadata": some(name=name)}
    return closed(*about, "spec", **about, spec=closed("entrypoint", "rayClusterSpec", **spec))


class TestRay:
    def test_rayjob(self, exported: Callable[..., str], odd_job: Path) -> None:
        text = exported("rayjob", odd_job, "workers=5", "--image", "registry.example/a:1")
        job = parsed(text)
        jsonschema.validate(job, rayjob())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(parsed(text.replace("groupName", "grupName")), rayjob())
        (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (5, 5, 5)
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "registry.example/a:1"
        assert container["resources"]["limits"] == {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": 1}
        assert job["spec"]["activeDeadlineSeconds"] > 30 * 60

    def test_rayjob_entrypoint(self, exported: Callable[..., str], odd_job: Path, tmp_path: Path) -> None:
        job = parsed(exported("rayjob", odd_job, "args=['$HOME']"))
        environment = stand_ins(tmp_path / "bin", {"chaosrun": ""})
        subprocess.run(["bash", "-c", job["spec"]["entrypoint"]], env=environment, cwd=tmp_path, timeout=300, check=True)
        path = f"/opt/chaosrun/{ODD}/job.yaml"
        assert told(environment) == [["chaosrun", "submit", path, "args=['$HOME']", "--root", "/mnt/chaosrun"]]

    def test_gpus_of_auto_are_left_to_the_user(self, exported: Callable[..., str]) -> None:
        text = exported("rayjob", PROBE)
        assert "nvidia.com/gpu" not in str(parsed(text))
        assert "per_worker.gpu is auto" in text
        assert "per_worker.gpu is auto" not in exported("rayjob", PROBE, "per_worker.gpu=0")

    def test_submission(self, exported: Callable[..., str], odd_job: Path, tmp_path: Path) -> None:
        script = exported("ray", odd_job)
        assert shellcheck(script) == ""
        environment = stand_ins(tmp_path / "bin", {"ray": ""}) | {"CHAOSRUN_ROOT": "/shared/a b"}
        subprocess.run(["sh", "-c", script], env=environment, cwd="/", timeout=300, check=True)
        ((*_, _, submit, path, root, place),) = told(environment)
        assert (submit, path, root, place) == ("submit", f"{ODD}/job.yaml", "--root", "/shared/a b")
        del environment["CHAOSRUN_ROOT"]
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode != 0 and "name a directory that all nodes of the cluster see" in done.stderr


# The drill ends in order when it is told to, as the real one does.
CHAOSRUN = "trap 'exit 130' TERM; touch started; for _ in {1..6000}; do [ ! -e finish ] || exit $(cat finish); sleep 0.05; done"
RAY = """[ $1 = health-check ] && exit 0; trap 'exit 0' TERM; echo $$ >> rays
for _ in {1..6000}; do [ ! -e lost ] || exit 1; sleep 0.05; done"""


class TestSlurm:
    @pytest.fixture
    def batch(self, odd_job: Path, exported: Callable[..., str], tmp_path: Path) -> "Callable[..., subprocess.Popen[str]]":
        """Runs the script as Slurm would, on two nodes."""
        path = tmp_path / "job.sh"
        path.write_text(exported("slurm", odd_job, "--nodes", "2"))
        programs = {"chaosrun": CHAOSRUN, "ray": RAY, "srun": 'shift 4; exec "$@"', "scontrol": ""}
        self.environment = stand_ins(tmp_path / "bin", programs)
        slurm = {"JOB_ID": "7", "CPUS_PER_TASK": "3", "JOB_NUM_NODES": "2"}
        self.environment |= {f"SLURM_{name}": value for name, value in slurm.items()}
        self.environment |= {"SLURMD_NODENAME": "n1", "CHAOSRUN_ROOT": str(tmp_path / "sha red")}

        def start(**more: str) -> subprocess.Popen[str]:
            (tmp_path / ODD / "started").unlink(missing_ok=True)
            Path(self.environment["TOLD"]).unlink(missing_ok=True)
            return subprocess.Popen(["bash", str(path)], env={**self.environment, **more}, cwd=tmp_path, text=True)

        return start

    def of(self, program: str) -> list[list[str]]:
        return [call[1:] for call in told(self.environment) if call[0] == program]

    def test_what_it_asks_for(self, exported: Callable[..., str], odd_job: Path) -> None:
        text = exported("slurm", odd_job, "--nodes", "2")
        assert shellcheck(text) == ""
        assert shellcheck(exported("slurm", SUITE)) == ""
        asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
        # Three workers with 1.5 CPUs and a GPU each: two on one node.
        wanted = {"--job-name=odd", "--nodes=2", "--cpus-per-task=3", "--gpus-per-node=2", "--time=00:45:00", "--requeue"}
        assert wanted <= asked
        assert "\n#SBATCH --gpus" not in exported("slurm", PROBE)

    @pytest.mark.parametrize("code", [0, 3])
    def test_a_drill(self, batch: "Callable[..., subprocess.Popen[str]]", tmp_path: Path, code: int) -> None:
        process = batch()
        eventually(lambda: len(self.of("ray")) >= 3)
        (tmp_path / "finish").write_text(str(code))
        assert process.wait(300) == code
        (drill,) = self.of("chaosrun")
        root = str(tmp_path / "sha red" / "slurm-7")
        assert drill[:4] == ["submit", str(tmp_path / ODD / "job.yaml"), "--root", root]
        address = drill[5]
        assert self.of("scontrol") == []
        rays = [call for call in self.of("ray") if call[0] == "start"]
        assert {"--head", f"--address={address}"} <= {word for call in rays for word in call}
        assert len(rays) == 2 and all("--num-cpus=3" in call for call in rays)
        assert (Path(root) / "references").resolve() == tmp_path / "sha red" / "references"

    @pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
    def test_signals(
        self, batch: "Callable[..., subprocess.Popen[str]]", tmp_path: Path, number: signal.Signals, again: bool
    ) -> None:
        process = batch()
        eventually((tmp_path / "started").exists)
        process.send_signal(number)
        assert process.wait(300) == 130
        assert self.of("scontrol") == ([["requeue", "7"]] if again else [])

    def test_it_goes_on(self, batch: "Callable[..., subprocess.Popen[str]]", tmp_path: Path) -> None:
        run = tmp_path / "sha red" / "slurm-7" / "runs" / "odd-1"
        run.mkdir(parents=True)
        (run / "run.json").touch()
        (tmp_path / "finish").write_text("0")
        assert batch(SLURM_RESTART_COUNT="1").wait(300) == 0
        (drill,) = self.of("chaosrun")
        assert drill[:3] == ["resume", "latest", "--root"]

    @pytest.mark.parametrize(("tries", "again"), [(0, True), (10, False)])
    def test_lost_nodes(self, batch: "Callable[..., subprocess.Popen[str]]", tmp_path: Path, tries: int, again: bool) -> None:
        process = batch(SLURM_RESTART_COUNT=str(tries))
        eventually((tmp_path / "started").exists)
        rays = tmp_path / "rays"
        eventually(lambda: rays.exists() and len(rays.read_text().split()) == 2)
        (tmp_path / "lost").touch()
        # The script has heard of their end when it has taken the dead ones away.
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in rays.read_text().split()))
        (tmp_path / "finish").write_text("7")
        assert process.wait(300) == 7
        assert self.of("scontrol") == ([["requeue", "7"]] if again else [])

    def test_no_resources_without_a_loss_is_an_end(self, batch: "Callable[..., subprocess.Popen[str]]", tmp_path: Path) -> None:
        (tmp_path / "finish").write_text("7")
        assert batch().wait(300) == 7
        assert self.of("scontrol") == []


class TestCommand:
    def test_to_a_file(self, exported: Callable[..., str], tmp_path: Path) -> None:
        path = tmp_path / "drill.sh"
        assert exported("slurm", PROBE, "--to", path) == f"wrote     {path}\nnext      sbatch {path}\n"
        spaced = tmp_path / "two words.sh"
        assert exported("slurm", PROBE, "--to", spaced) == f"wrote     {spaced}\nnext      sbatch '{spaced}'\n"
        assert os.access(path, os.X_OK)
        assert path.read_text() == exported("slurm", PROBE)

    def test_to_a_pipe(self, exported: Callable[..., str], tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            exported("slurm", PROBE, "--to", pipe)
            assert os.read(reader, 1 << 16).decode() == exported("slurm", PROBE)
        finally:
            os.close(reader)
        assert pipe.is_fifo()

    def test_json(self, exported: Callable[..., str]) -> None:
        told = json.loads(exported("rayjob", PROBE, "-o", "json"))
        assert (told["v"], told["kind"], told["path"]) == (1, "rayjob", None)
        assert told["text"] == exported("rayjob", PROBE)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["slurm", PROBE, "--shards", "2"], "--shards is for `export github`"),
            (["github", PROBE, "--nodes", "2"], "--nodes is for `export slurm`"),
            (["github", PROBE, "--image", "x"], "--image is for `export rayjob`"),
            (["slurm", PROBE, "--nodes", "3"], "3 nodes are not for 2 workers"),
            (["slurm", PROBE, "--nodes", "0"], "0 nodes are not for 2 workers"),
            (["github", PROBE, "--shards", "2"], "a job is one drill"),
            (["github", SUITE, "--shards", "0"], "0 is not a number of shards"),
            (["github", PROBE, "workers=3"], "a workflow takes no changes"),
            (["slurm", SUITE, "workers=3"], "is a suite, which takes no changes"),
            (["slurm", PROBE, "wrokers=3"], "unknown key 'wrokers'"),
            (["slurm", PROBE, "args=['a\nb']"], "no script can quote"),
            (["rayjob", ROOT / "jobs" / "nope.yaml"], "no such job file or suite"),
            (["slurm", PROBE, "--to", PROBE], "exists already"),
            (["slurm", PROBE, "--to", ROOT / "jobs" / "nowhere" / "x.sh"], "there is no such directory"),
        ],
    )
    def test_bad_input(self, capsys: pytest.CaptureFixture[str], arguments: list[Any], said: str) -> None:
        before = PROBE.read_text()
        assert cli.main(["export", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and "hint: " in err
        assert PROBE.read_text() == before
