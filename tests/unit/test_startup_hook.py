"""The start-up hook of a command's interpreters: what it hides is imported, processes that never train stay as they are."""

import json
import os
import socket
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

from chaosrun.cluster.command import HOOK, environment, filled_in
from chaosrun.processes import PACKAGE_ROOT
from chaosrun.records.announcements import VARIABLE, Startup
from chaosrun.records.codec import encode
from tests.integration.ranks import make_orders

MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"
STARTUP = Startup(socket=f"chaosrun-{uuid.uuid4().hex}", seed=1, deterministic="strict", threads=1, world_size=1)


def run(code: str, *, path: tuple[Path | str, ...] = (), hooked: bool = True) -> "subprocess.CompletedProcess[str]":
    folders = [*([HOOK] if hooked else []), *path]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, folders)), VARIABLE: encode(STARTUP).decode()}
    env = {**os.environ, **variables} if hooked else {**os.environ, "PYTHONPATH": variables["PYTHONPATH"]}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_that_imports_no_torch_loads_the_hook_and_nothing_else() -> None:
    with_hook, without = (set(json.loads(run(MODULES, hooked=hooked).stdout)) for hooked in (True, False))
    assert with_hook - without == {"sitecustomize"}
    assert not run("import sys; assert not [entry for entry in sys.path if 'startup' in entry], sys.path").stderr


def test_a_process_that_imports_torch_imports_little_more_and_ends_loudly_if_it_trains_when_its_attempt_is_over() -> None:
    code = f"import time, torch; {MODULES}"
    told = run(f"{code}; torch.optim.SGD([torch.zeros(1)], lr=1.0); print('trains on')")
    with_hook, without = (set(json.loads(seen)) for seen in (told.stdout, run(code, hooked=False).stdout))
    new = {name.partition(".")[0] for name in with_hook - without}
    assert "chaosrun" in new
    assert new.isdisjoint({"sympy", "accelerate", "pydantic", "ray"})
    assert not {
        name for name in with_hook - without if name.startswith(("torch._dynamo", "chaosrun.observe", "chaosrun.faults"))
    }
    assert told.returncode == 71
    assert "the attempt that started this process is over" in told.stderr


def test_a_process_that_multiprocessing_spawns_is_seeded_as_every_rank_is(tmp_path: Path) -> None:
    code = """
import multiprocessing, random, numpy, torch
def show():
    print(random.random(), numpy.random.random(), torch.rand(1).item(), flush=True)
if __name__ == "__main__":
    show()
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start()
    child.join()
"""
    script = tmp_path / "spawns.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": f"{HOOK}{os.pathsep}{PACKAGE_ROOT}", VARIABLE: encode(STARTUP).decode()}
    told = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120, check=True)
    parent, child = told.stdout.splitlines()
    assert parent == child


def test_the_sitecustomize_that_it_hides_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nseen = 'it was here'\n")
    told = run("import sitecustomize; print(sitecustomize.seen, sitecustomize.__file__)", path=(tmp_path,))
    assert told.stdout.split()[-1] == str(tmp_path / "sitecustomize.py") and "it was here" in told.stdout


def test_an_error_in_the_sitecustomize_that_it_hides_is_told_as_python_tells_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import module_that_is_not_there\n")
    hooked, alone = (run("print('on')", path=(tmp_path,), hooked=hooked) for hooked in (True, False))
    assert (hooked.stdout, hooked.returncode) == (alone.stdout, alone.returncode) == ("on\n", 0)
    assert "module_that_is_not_there" in hooked.stderr.strip().splitlines()[-1] == alone.stderr.strip().splitlines()[-1]


def test_a_process_that_cannot_be_observed_ends_loudly(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "msgspec.py").write_text("raise ImportError('not for this Python')\n")
    told = run("import torch; print('trains on')", path=(tmp_path,))
    assert told.returncode == 70 and told.stdout == ""
    assert "chaosrun cannot observe this process: ImportError: not for this Python" in told.stderr


def test_a_process_that_trains_announces_itself_with_its_rank(tmp_path: Path) -> None:
    code = "import os, torch; os.environ['RANK'] = '3'; os.environ['WORLD_SIZE'] = '4'; torch.nn.Linear(1, 1)(torch.zeros(1))"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{STARTUP.socket}")
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(HOOK), VARIABLE: encode(STARTUP).decode()},
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as lines:
            claim = json.loads(lines.readline())
            connection.sendall(b'{"refused": "launcher_restarts"}\n')
        assert (claim["rank"], claim["world_size"], claim["ignores_sigterm"]) == (3, 4, False)
        assert "may not train as rank 3 of 4: launcher_restarts" in process.communicate(timeout=120)[1]
        assert process.returncode == 71


def test_a_command_is_told_its_place_its_rendezvous_and_no_path_that_could_hide_its_own_packages(tmp_path: Path) -> None:
    (order,) = make_orders(tmp_path, ["--epochs"])
    command = ("launch", "--port={master_port}", "{node_rank}/{nodes}", "{workers_per_node}", "{output}", "{other}", "{}")
    place = {"node_rank": 1, "nodes": 2, "master_port": 4711, "gpus": (2, 3), "resume_env": {"RESUME": "yes"}}
    order = replace(order, command=command, announcements="here", **place)
    told = ["launch", "--port=4711", "1/2", "1", str(tmp_path / "output"), "{other}", "{}", "--epochs"]
    assert filled_in(order) == told
    seen = environment(order, {"HOME": "/home", "PYTHONPATH": f"/own:{PACKAGE_ROOT}"})
    assert seen["PYTHONPATH"] == f"{HOOK}:/own"
    assert {name: seen[name] for name in ("HOME", "MASTER_PORT", "PET_MASTER_PORT", "CUDA_VISIBLE_DEVICES", "RESUME")} == {
        "HOME": "/home",
        "MASTER_PORT": "4711",
        "PET_MASTER_PORT": "4711",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "RESUME": "yes",
    }
    assert "RANK" not in seen and json.loads(seen[VARIABLE])["socket"] == "here"
