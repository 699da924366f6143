"""Every script that is drilled, and what its drill must say: the table from which the tests and docs/frameworks.md are made.

A script is one of `init`'s templates, or of the folder `scripts`. None imports chaosrun. One that is wrong is a right one with
an option of its own, or with a line changed as users leave it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
TEMPLATES = HERE.parents[1] / "chaosrun" / "integrations" / "templates"
TORCHRUN = ("torchrun", "--nproc-per-node", "{workers_per_node}", "--master-port", "{master_port}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    name: str
    what: str
    """What the script does, as a row of the page says it."""
    script: str
    """Of the templates' folders ("trainer/train.py"), or of `scripts`."""
    args: tuple[str, ...] = ()
    change: tuple[str, str] | None = None
    """Text of the script, and what stands there instead."""
    launch: tuple[str, ...] = ()
    """A launcher; none: chaosrun starts the script."""
    workers: int = 2
    kills: tuple[tuple[int, int], ...] = ((1, 8), (0, 17))
    """Rank and step."""
    kind: str = "kill"
    preload: tuple[str, ...] = ()
    verdict: Literal["PASS", "FAIL"] = "PASS"
    cause: str = ""
    """The code of the verdict's cause, where it fails."""
    quick: bool = False
    """Part of `make test`."""

    @property
    def path(self) -> Path:
        return HERE / "scripts" / self.script if "/" not in self.script else TEMPLATES / self.script


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    title: str
    packages: tuple[str, ...]
    """What the page tells the versions of, and what has to be installed."""
    subjects: tuple[Subject, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    """Module to look for by package, where it is called otherwise."""


TRAINER = {"script": "trainer/train.py", "preload": ("transformers.trainer", "transformers.models.llama.modeling_llama")}
LIGHTNING = {"script": "lightning/train.py", "preload": ("pytorch_lightning", "torchdata.stateful_dataloader")}

FRAMEWORKS: tuple[Framework, ...] = (
    Framework(
        title="torch: DistributedDataParallel",
        packages=("torch", "torchdata"),
        subjects=(
            Subject(
                name="ddp",
                what="a DistributedSampler, dropout, one checkpoint file with every rank's random state",
                script="torch/train.py",
                workers=3,
                kills=((1, 8), (0, 17)),
                quick=True,
            ),
            Subject(name="ddp-torchrun", what="the same under torchrun", script="torch/train.py", launch=TORCHRUN),
            Subject(
                name="ddp-scheduler-forgotten",
                what="the same, its scheduler saved and not loaded",
                script="torch/train.py",
                change=('scheduler.load_state_dict(saved["scheduler"])', "pass"),
                kills=((0, 8),),
                verdict="FAIL",
                cause="lr_scheduler_not_restored",
            ),
            Subject(name="memmap", what="random windows over a memmap, the streams saved", script="memmap.py"),
            Subject(
                name="memmap-random-forgotten",
                what="the same, saving what nanoGPT saves: no random state",
                script="memmap.py",
                args=("--forget-random",),
                kills=((1, 8),),
                verdict="FAIL",
                cause="rng_not_restored",
                quick=True,
            ),
            Subject(
                name="stateful-loader",
                what="torchdata's StatefulDataLoader with a loading process, a file for each rank",
                script="stateful.py",
                kills=((1, 7), (0, 13)),
            ),
            Subject(
                name="stateful-loader-forgotten",
                what="the same, the loader's state not loaded",
                script="stateful.py",
                args=("--loader-forgotten",),
                kills=((1, 8),),
                verdict="FAIL",
                cause="batches_repeated",
            ),
        ),
    ),
    Framework(
        title="torch: FSDP2 with torch.distributed.checkpoint",
        packages=("torch",),
        subjects=(
            Subject(name="fsdp", what="fully_shard, dcp.save", script="fsdp.py"),
            Subject(name="fsdp-4", what="the same on 4 ranks", script="fsdp.py", workers=4, kills=((3, 8), (0, 14))),
            Subject(
                name="fsdp-async",
                what="dcp.async_save",
                script="fsdp.py",
                args=("--async-save",),
                # The save of step 5 is sure to be complete only when that of step 10 begins.
                kills=((1, 12), (0, 17)),
            ),
            Subject(
                name="fsdp-optimizer-forgotten",
                what="the weights alone are loaded",
                script="fsdp.py",
                args=("--forget-optimizer",),
                kills=((1, 8),),
                verdict="FAIL",
                cause="optimizer_state_not_restored",
            ),
        ),
    ),
    Framework(
        title="accelerate",
        packages=("accelerate",),
        subjects=(
            Subject(
                name="accelerate",
                what="save_state, load_state, set_epoch, skip_first_batches, dropout, a loader with a generator",
                script="accelerate/train.py",
                workers=3,
            ),
            Subject(
                name="accelerate-launch",
                what="the same under accelerate launch",
                script="accelerate/train.py",
                launch=(
                    "accelerate",
                    "launch",
                    "--multi_gpu",
                    "--num_processes",
                    "{workers_per_node}",
                    "--main_process_port",
                    "{master_port}",
                ),
            ),
            Subject(
                name="accelerate-documented",
                what="as documented: the loader without a generator of its own",
                script="accelerate/train.py",
                change=(", generator=torch.Generator()", ""),
                kills=((1, 8),),
                verdict="FAIL",
                cause="rng_not_restored",
            ),
        ),
    ),
    Framework(
        title="transformers Trainer",
        packages=("transformers", "accelerate"),
        subjects=(
            Subject(
                name="trainer",
                what="resume_from_checkpoint, save_total_limit, gradient accumulation, attention dropout",
                workers=3,
                kills=((1, 8), (0, 13)),
                **TRAINER,
            ),
            Subject(name="trainer-torchrun", what="the same under torchrun", launch=TORCHRUN, **TRAINER),
            Subject(
                name="trainer-jit",
                what="enable_jit_checkpoint: it saves once more when SIGTERM comes; no dropout",
                # It saves 3 s after the signal: the training has to last longer. Each rank waits by itself, and saves at
                # another step than the others, which ends in an error of gloo. It saves between a step's forward pass and its
                # update: dropout would then be drawn from the next step's random numbers.
                workers=1,
                change=(
                    "        attention_dropout=0.1,\n    )\n",
                    "    )\n    args.num_train_epochs, args.enable_jit_checkpoint = 40, True\n",
                ),
                kills=((0, 8),),
                kind="preempt",
                **TRAINER,
            ),
            Subject(
                name="trainer-from-model",
                what="the model of the last checkpoint, without resume_from_checkpoint",
                change=(
                    "trainer.train(resume_from_checkpoint=last)",
                    "(trainer._load_from_checkpoint(last) if last else None, trainer.train())[1]",
                ),
                kills=((1, 8),),
                verdict="FAIL",
                cause="optimizer_state_not_restored",
                **TRAINER,
            ),
        ),
    ),
    Framework(
        title="Lightning",
        packages=("pytorch-lightning", "torchdata"),
        modules={"pytorch-lightning": "pytorch_lightning"},
        subjects=(
            Subject(
                name="lightning", what='ckpt_path="last", a StatefulDataLoader, dropout that follows from the step', **LIGHTNING
            ),
            Subject(
                name="lightning-launching", what="the same, Lightning starting its processes", launch=("python",), **LIGHTNING
            ),
            Subject(
                name="lightning-plain-loader",
                what="torch's DataLoader, as most have it",
                change=("        return StatefulDataLoader(", "        return torch.utils.data.DataLoader("),
                kills=((1, 8),),
                verdict="FAIL",
                cause="batches_repeated",
                **LIGHTNING,
            ),
            Subject(
                name="lightning-dropout",
                what="dropout from the global random stream, which Lightning does not save",
                change=("        torch.manual_seed(SEED + 1000 * self.global_step + self.global_rank)\n", ""),
                kills=((1, 8),),
                verdict="FAIL",
                cause="rng_not_restored",
                **LIGHTNING,
            ),
        ),
    ),
    Framework(
        title="Hugging Face datasets",
        packages=("datasets",),
        subjects=(
            Subject(
                name="stream",
                what="a stream split by node, mapped, its state saved",
                script="stream.py",
                kills=((1, 8), (0, 13)),
            ),
            Subject(
                name="stream-buffer",
                what="the same, shuffled through a buffer",
                script="stream.py",
                args=("--buffer", "16"),
                kills=((1, 8),),
                verdict="FAIL",
                cause="data_order_not_restored",
            ),
        ),
    ),
    Framework(
        title="Ray Train",
        packages=("ray", "pyarrow"),
        subjects=(
            Subject(
                name="ray-train",
                what="TorchTrainer on a Ray of its own, its newest checkpoint found by itself",
                script="ray_train.py",
                launch=("python",),
                kills=((1, 14), (0, 21)),
            ),
        ),
    ),
)
