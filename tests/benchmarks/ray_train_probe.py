"""`ray_train_probe.py FOLDER MEGABYTES`: runs peer_probe so on two workers of Ray Train, which recovers by its own means."""

import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    import ray.train

    sys.path.insert(0, config["here"])
    import peer_probe  # pyright: ignore[reportMissingImports]

    peer_probe.main(Path(config["folder"]), ray.train.get_context().get_world_rank(), config["megabytes"])


if __name__ == "__main__":
    folder, megabytes = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=f"{folder}/r")
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "here": str(Path(__file__).parent), "megabytes": megabytes},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder, name="run", failure_config=FailureConfig(max_failures=3)),
    ).fit()
