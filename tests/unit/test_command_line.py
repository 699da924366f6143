"""Jobs without a file: what is typed, what is guessed, what is refused, and what `--write` keeps."""

import json
import os
import sys
from contextlib import nullcontext
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from chaosrun import cli
from chaosrun.campaign import sweep
from chaosrun.errors import UsageError
from chaosrun.spec.job_file import load_job

SCRIPT = "import torch.distributed\nimport torch\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "alone.py").write_text("import torch\n")
    (tmp_path / "attached.py").write_text("from chaosrun import attach\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    return tmp_path


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(line.split())
    out, err = capsys.readouterr()
    return code, out, err


def spec_of(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict, str]:
    """What `validate` makes of a command line, and what it tells."""
    words, dashes, rest = line.partition(" -- ")
    code, out, err = run(f"validate {words} -o json{dashes}{rest}", capsys)
    assert code == 0, err
    return json.loads(out)["spec"], err


def test_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    spec, told = spec_of("train.py --workers 3 --kill 1@65 --kill 0@70:forward --preempt all@80 -- --epochs 3 a=b", capsys)
    assert (spec["name"], spec["script"], spec["args"], spec["workers"]) == ("train", "train.py", ["--epochs", "3", "a=b"], 3)
    first, second, third = spec["faults"]["schedule"]
    assert (first["kind"], first["rank"], first["at_step"], first["phase"]) == ("kill", 1, 65, None)
    assert (second["at_step"], second["phase"], third["kind"], third["rank"]) == (70, "forward", "preempt", "all")
    assert spec["resume"]["by"] == "script"
    assert spec_of("train.py args[]=--z -- --epochs 3", capsys)[0]["args"] == ["--epochs", "3", "--z"]
    why = "train.py does not import chaosrun: its own checkpoints and resume code are tested"
    assert told == f"guessed   resume by: the script, as {why}\n"


@pytest.mark.parametrize("word", ["two\nlines: [", "a\r\nworkers: 7", "\x85", "\u2028", "\x7f", "\x01", "\ufeff", "😀 #"])
def test_an_argument_that_no_line_of_yaml_holds_as_it_is(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "train.py", "-o", "json", "--write", "kept.yaml", "--", "--prompt", word]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["args"] == ["--prompt", word]
    assert spec_of("kept.yaml", capsys)[0]["args"] == ["--prompt", word]


@pytest.mark.parametrize("name", ["2024", "1.5", "1e3", "null", "off"])
def test_a_script_whose_name_yaml_reads_as_something_else(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / f"{name}.py").write_text("import torch.distributed\n")
    assert spec_of(f"{name}.py", capsys)[0]["name"] == name


@pytest.mark.parametrize(
    ("line", "workers", "told"),
    [
        ("train.py", 2, "workers: 2, as the script imports torch.distributed"),
        ("alone.py", 1, "workers: 1, as the script imports nothing that trains on several ranks"),
        ("-- torchrun --nproc-per-node 3 train.py", 3, "workers: 3, as the command says --nproc-per-node 3"),
        ("-- torchrun --nproc_per_node=4 train.py --num_processes 9", 4, "as the command says --nproc_per_node 4"),
        ("-- accelerate launch --num_processes 2 train.py", 2, "as the command says --num_processes 2"),
        ("-- python -m pkg.train", 1, "as the command names no number of ranks"),
        ("--workers 4 -- torchrun --nproc-per-node 2 --nnodes {nodes} train.py", 4, ""),
        ("--workers 4 -- torchrun --nproc-per-node 2 --nnodes 2 --node-rank {node_rank} train.py", 4, ""),
        ("--workers 4 -- torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint {master_addr}:29400 train.py", 4, ""),
        ("--workers 4 -- torchrun --nnodes 1:2 train.py", 4, ""),
        ("--workers 4 -- torchrun train.py --nnodes 2", 4, ""),
        ("--workers 2 -- torchrun --nproc-per-node {workers_per_node} train.py", 2, ""),
    ],
)
def test_workers_are_guessed(line: str, workers: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec, said = spec_of(line if line.startswith("train") or line.startswith("alone") else f" {line}", capsys)
    assert spec["workers"] == workers and told in said
    assert (spec["command"] is None) == ("--" not in line.split())


@pytest.mark.parametrize(
    ("line", "workers", "told"),
    [
        (" -- accelerate launch train.py", 3, "default_config.yaml says num_processes: 3; --workers says otherwise"),
        (" -- accelerate launch --config_file acc.yaml train.py", 4, "as acc.yaml says num_processes: 4"),
        (" -- python -m accelerate.commands.launch --config-file=acc.yaml train.py", 4, "as acc.yaml says num_processes: 4"),
        (" -- accelerate launch --config_file acc.yaml --num_processes 2 train.py", 2, "as the command says --num_processes 2"),
        (" -- accelerate launch --config_file none.yaml train.py", 1, "as the command names no number of ranks"),
        (" -- accelerate launch --config_file cpu.yaml train.py", 1, "as the command names no number of ranks"),
        (" -- accelerate launch --cpu train.py", 1, "as the command names no number of ranks"),
        (" -- torchrun train.py --config_file acc.yaml", 1, "as the command names no number of ranks"),
        (" --workers 2 -- accelerate launch train.py", 2, ""),
    ],
)
def test_workers_that_the_configuration_of_accelerate_says(
    line: str, workers: int, told: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(here / "cache"))
    (here / "cache" / "accelerate").mkdir(parents=True)
    (here / "cache" / "accelerate" / "default_config.yaml").write_text("num_machines: 1\nnum_processes: 3\n")
    (here / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    (here / "cpu.yaml").write_text("distributed_type: 'NO'\nnum_processes: 4\n")
    spec, said = spec_of(line, capsys)
    assert spec["workers"] == workers and told in said


def test_a_guess_that_a_change_replaces_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    spec, said = spec_of("train.py workers=1", capsys)
    assert spec["workers"] == 1 and "workers:" not in said and "resume by:" in said


@pytest.mark.parametrize(
    ("source", "workers", "by"),
    [
        ("import os, torch.distributed as dist", 2, "script"),
        ("import torch\ntorch.distributed.init_process_group('gloo')", 2, "script"),
        ("import torch  # torch.distributed, accelerate", 1, "script"),
        ("from mine import accelerate", 1, "script"),
        ("import os, chaosrun", 1, "chaosrun"),
        ("import os  # , chaosrun", 1, "script"),
    ],
)
def test_what_a_script_imports(source: str, workers: int, by: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").touch()
    (here / "other.py").write_text(f"{source}\n")
    spec, _ = spec_of("other.py", capsys)
    assert (spec["workers"], spec["resume"]["by"]) == (workers, by)


def test_python_alone_is_started_on_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Only where several are asked for: else the command is drilled as it is."""
    spec, told = spec_of("--workers 3 -- python -m pkg.train --lr 0.10", capsys)
    assert (spec["module"], spec["args"], spec["command"]) == ("pkg.train", ["--lr", "0.10"], None)
    assert "guessed   module: pkg.train, which chaosrun starts on each rank" in told
    spec, _ = spec_of("--workers 3 -- python -m torch.distributed.run --nproc-per-node 3 train.py", capsys)
    assert spec["module"] is None


@pytest.mark.parametrize(
    ("source", "line", "workers"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(main, nprocs=3)", "own.py -- --lr 0.1", 3),
        ("from torch.multiprocessing import spawn\nspawn(main, nprocs=gpus)", "own.py --workers 4 -- --lr 0.1", 4),
        ("import os\nos.environ['RANK'] = '0'\nmp.spawn(main)", " -- python own.py --lr 0.1", 2),
        ("notebook_launcher(main, num_processes=2)", "--workers 2 -- python own.py --lr 0.1", 2),
    ],
)
def test_a_script_that_starts_its_ranks_itself_is_started_once(
    source: str, line: str, workers: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On each rank, it would start those ranks again, which wait for each other until they are taken for hung."""
    (here / "own.py").write_text(f"{source}\n")
    spec, told = spec_of(line, capsys)
    assert (spec["command"][1:], spec["script"], spec["workers"]) == (["own.py", "--lr", "0.1"], None, workers)
    assert ("as own.py starts its ranks itself" in told) == line.startswith("own.py")


@pytest.mark.parametrize("looks", ["if 'RANK' in os.environ: main()", "world = int(os.environ.get('WORLD_SIZE', 1))"])
def test_a_script_that_looks_whether_it_was_launched_is_started_on_each_rank(
    looks: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own.py").write_text(f"import torch.multiprocessing as mp\n{looks}\nmp.spawn(main)\n")
    assert spec_of("own.py --workers 2", capsys)[0]["script"] == "own.py"


def test_what_is_written_says_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "train.py max_steps=40 faults.seed=7 outputs=[out] --kill 1@6:reduce -- --name no --lr 0.10"
    spec, _ = spec_of(line, capsys)
    words, _, rest = line.partition(" -- ")
    assert run(f"validate {words} --write job.yaml -- {rest}", capsys)[0] == 0
    assert load_job(here / "job.yaml").spec.model_dump(mode="json") == {**spec, "directory": None}
    text = (here / "job.yaml").read_text()
    assert "# what was typed: chaosrun submit train.py --kill 1@6:reduce -- --name no --lr 0.10" in text
    assert "workers: 2    # as the script imports torch.distributed" in text
    # Elsewhere it says where it starts from.
    (here / "jobs").mkdir()
    assert run("validate train.py --write jobs/other.yaml", capsys)[0] == 0
    assert load_job(here / "jobs" / "other.yaml").script_path == here / "train.py"
    # And nothing is written over, or of a job that is wrong.
    assert run("validate train.py --write job.yaml", capsys)[2].startswith("error: --write job.yaml: it is there already")
    assert run("validate train.py workers=0 --write new.yaml", capsys)[0] == 2 and not (here / "new.yaml").exists()


def test_faults_are_added_to_a_job_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.yaml").write_text("name: x\nscript: train.py\nworkers: 2\nfaults: {schedule: [{rank: 0, at_step: 3}]}\n")
    spec, told = spec_of("job.yaml --kill 1@9 --workers 3", capsys)
    assert [(each["rank"], each["at_step"]) for each in spec["faults"]["schedule"]] == [(0, 3), (1, 9)]
    assert spec["workers"] == 3 and not told


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("validate", "nothing to drill"),
        ("validate trian.py", "did you mean train.py?"),
        ("validate torchrun", "a command comes after two dashes: chaosrun submit -- torchrun"),
        ("validate train.py --kill 1", "--kill '1' is not of the form RANK@STEP or RANK@STEP:PHASE"),
        ("validate train.py --preempt 1@3:reduce", "not of the form RANK@STEP"),
        ("validate train.py --kill 5@3", "rank 5 does not exist"),
        ("validate train.py --kill 0@3:forwrd", "did you mean 'forward'?"),
        ("validate train.py --epochs 3", "what is for the script comes after two dashes: chaosrun validate train.py -- …"),
        ("validate -- torchrnu train.py", "no such program: torchrnu is not on the PATH"),
        ("validate -- torchrun trian.py", "did you mean train.py?"),
        ("validate -- torchrun --nproc-per-node auto train.py", "chaosrun cannot tell how many ranks that is"),
        ("validate --workers 3 -- torchrun --nproc-per-node 2 train.py", "does not agree with --nproc-per-node 2"),
        ("validate -- torchrun --nnodes 2 --nproc-per-node 2 train.py", "--nnodes {nodes} --node-rank {node_rank}"),
        ("validate -- python -m torch.distributed.run --nnodes=2 --node-rank 0 train.py", "started once on each node"),
        ("validate --workers 2 -- python -m pkg.tarin", "no module pkg.tarin"),
        ("validate train.py -- --out {outptu}", "did you mean {output}?"),
        ("validate train.py -- --node {node_rank}", "{node_rank} is filled in for a command alone"),
        ("validate train.py checkpoint.every_steps=3", "checkpoint means nothing here: the job resumes by itself"),
        ("validate attached.py outputs=[out]", "outputs means nothing here: chaosrun saves and resumes"),
        ("validate train.py --kill 0@3:checkpoint.precommit", "phase save is inside its own save"),
        ("validate train.py args=[--x] -- --y", "args=… takes the place of what comes after --"),
        ("validate command=[torchrun,train.py] -- torchrun train.py", "command=… takes the place of what comes after --"),
        ("validate train.py outputs=[/data/out]", "outputs are relative"),
        ("validate train.py outputs=[../out]", "outputs are relative"),
    ],
)
def test_what_is_refused(line: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(line, capsys)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split()), err
    assert "hint: " in err
    assert not list(here.glob(".chaosrun*"))


def test_a_script_that_cannot_be_compiled(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text("import torch\n\ndef step(:\n    pass\n")
    code, _, err = run("validate train.py", capsys)
    assert code == 2
    assert err.splitlines()[:3] == [
        f"error: {here}/train.py:3:10: SyntaxError: invalid syntax",
        "     3 | def step(:",
        "       |          ^",
    ]
    compiled = "1:1: it holds no text: a zip, or compiled\nhint: name the source"  # Python alone would run it
    for data, said in (
        (b"#!/usr/bin/env python\nPK\3\4\0\0\xfftrain", compiled),
        (MAGIC_NUMBER + b"\0\0\0\0train", compiled),
        (b"import torch\nname = 'a\0b'\n", "2:1: a NUL byte in its text\nhint: remove it"),
    ):
        (here / "train.py").write_bytes(data)
        code, _, err = run("validate train.py", capsys)
        assert (code, err.count("\n")) == (2, 2)
        assert err.startswith(f"error: {here}/train.py:{said}")


def test_a_load_of_its_own_beside_attach_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it gets wrong, attach hides."""
    own = "if resume:\n    model.load_state_dict(torch.load('last.pt'))\ntrainer.train(resume_from_checkpoint=True)\n"
    (here / "attached.py").write_text(f"from chaosrun import attach\n{own}")
    code, _, err = run("validate attached.py", capsys)
    assert code == 0
    assert "warning: the script also loads its own checkpoints (torch.load, line 3, resume_from_checkpoint=, line 4)" in err
    (here / "train.py").write_text(f"import torch.distributed\n{own}")
    assert "warning" not in run("validate train.py", capsys)[2]
    (here / "attached.py").write_text("from chaosrun import attach\ntrainer.train(resume_from_checkpoint=None)\n")
    assert "warning" not in run("validate attached.py", capsys)[2]


@pytest.mark.parametrize("fault", ["--kill 1@6", "--preempt 0@3"])
def test_a_run_in_production_takes_no_faults(fault: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would not be struck."""
    code, _, err = run(f"run {fault} --root root train.py", capsys)
    assert code == 2 and "error: a run in production has no planned faults" in err
    assert "leave out --kill, --preempt" in err and not (here / "root").exists()
    code, told, _ = run("run --help", capsys)
    assert code == 0 and fault.split()[0] not in told and "--write" in told


@pytest.mark.parametrize(("line", "workers"), [("train.py --workers 3 -- --epochs 3", 3), ("--saves -- torchrun train.py", 1)])
def test_a_sweep_takes_what_submit_takes(
    line: str, workers: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was typed is a job file in the sweep's folder from then on."""

    def begin(self: Any, *_: object) -> None:
        text = self.job.path.read_text()
        assert self.job.path.parent == self.folder.path and "# what was typed: chaosrun submit" in text
        raise UsageError(f"{self.job.spec.workers} workers in {self.job.directory}")

    monkeypatch.setattr(sweep._SweepRun, "begin", begin)
    monkeypatch.setattr(sweep, "one_ray", lambda *_: nullcontext(MagicMock()))
    code, _, err = run(f"sweep {line} --root root" if "--" not in line.split() else f"sweep --root root {line}", capsys)
    assert code == 2 and f"error: {workers} workers in {here}" in err
    assert list((here / "root" / "sweeps").iterdir()) == []
    code, _, err = run("sweep --kill 0@3 train.py", capsys)
    assert code == 2 and "a sweep strikes at every point by itself" in err
    code, _, err = run("sweep --resume x train.py", capsys)
    assert code == 2 and "x/job.yaml --resume x" in err
