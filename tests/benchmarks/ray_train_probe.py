"""`ray_train_probe.py FOLDER`: runs peer_probe on two workers of Ray Train, with its own recovery from failures."""

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

    peer_probe.main(Path(config["folder"]), ray.train.get_context().get_world_rank())


if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=f"{folder}/r")
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "here": str(Path(__file__).parent)},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder, name="run", failure_config=FailureConfig(max_failures=3)),
    ).fit()
