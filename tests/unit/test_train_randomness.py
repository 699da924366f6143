"""The epoch that `sample_rng` draws for: shared by a rank with its loader workers, and with nobody else."""

import subprocess
import sys
from pathlib import Path

RANK_BESIDE_ITS_SERVER = """
import os, sys
from chaosrun.records.order import WorkerOrder
from chaosrun.train import randomness, worker

randomness.enter_epoch(7, 0)
before = randomness.sample_rng(3).random()
if os.fork() == 0:
    order = WorkerOrder(
        leg="chaos", leg_path=sys.argv[1], storage_path=None, attempt=1, rank=1, world_size=2, local_rank=1, local_world_size=2,
        node_rank=0, master_addr="127.0.0.1", master_port=1, script=sys.argv[2], cwd=sys.argv[1], seed=0, deterministic="off",
        threads=1, every_steps=1, keep=2,
    )
    worker.main(order, None)
    os._exit(0)
os.wait()
print(before, randomness.sample_rng(3).random())
"""


def test_a_rank_shares_its_epoch_with_no_rank_of_the_same_fork_server(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from chaosrun.train.randomness import enter_epoch\nenter_epoch(7, 1)\nopen('ran', 'w').close()\n")
    command = [sys.executable, "-c", RANK_BESIDE_ITS_SERVER, str(tmp_path), str(script)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert (tmp_path / "ran").exists()
    before, after = done.stdout.split()[-2:]
    assert before == after
