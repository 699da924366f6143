"""The zoo's catalogue: real resume bugs of released libraries, the releases that have them, and what a drill must say.

Each has a job of its own in `jobs/`, over a script as users of the library write it. What a row expects is what its thread
describes; releases without the bug are its control.
"""

from dataclasses import dataclass

HTTP = ("httpx==0.28.1", "httpcore==1.0.9")
HUB = ("huggingface-hub==1.4.0", *HTTP)
BESIDE_DATASETS = (
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "pyarrow==22.0.0",
    "pandas==2.3.3",
    "fsspec==2026.6.0",
    "python-dateutil==2.9.0.post0",
    "six==1.17.0",
    "pytz==2025.2",
    "tzdata==2025.2",
)
DATASETS = (*HUB, *BESIDE_DATASETS)
OLD_DATASETS = ("datasets==4.8.4", *HTTP, *BESIDE_DATASETS)
"""For older transformers, which import whatever datasets there is: a newer one needs a newer huggingface-hub."""
LITDATA = ("lightning-utilities==0.15.2", "setuptools==75.8.0")
LIGHTNING = ("lightning-utilities==0.15.2", "torchmetrics==1.8.2", "torchdata==0.11.0")
TENSORDICT = ("tensordict==0.15.3", "orjson==3.13.0", "pyvers==0.2.3", "importlib_metadata==10.2.0", "zipp==4.1.2")
TRANSFORMERS_4 = ("transformers==4.57.6", "accelerate==1.14.0", "huggingface-hub==0.36.0", "tokenizers==0.22.2", *OLD_DATASETS)
TRANSFORMERS_5 = ("huggingface-hub==1.4.0", *OLD_DATASETS, "tokenizers==0.22.2", "typer-slim==0.21.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One drill of a bug's job: with which releases, and what must come of it."""

    of: str
    """Part of the drill's name: bad (the releases have the bug), good (they have not), or what is different."""
    releases: tuple[str, ...]
    """NAME==VERSION of what comes first on Python's path; the first is the one that it is about."""
    verdict: str
    cause: str | None = None
    """The verdict's code (docs/causes.md)."""
    kills: tuple[tuple[int, int], ...] | None = None
    """(rank, step), in the place of the job's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    name: str
    """That of its job file."""
    thread: str
    wrong: str
    """What goes wrong, in one sentence."""
    drills: tuple[Drill, ...]

    @property
    def library(self) -> str:
        return self.thread.partition("#")[0].partition("/")[2]

    @property
    def url(self) -> str:
        repository, number = self.thread.split("#")
        return f"https://github.com/{repository}/issues/{number}"


def bad(*releases: str, cause: str) -> Drill:
    return Drill(of="bad", releases=releases, verdict="FAIL", cause=cause)


def good(*releases: str) -> Drill:
    return Drill(of="good", releases=releases, verdict="PASS")


BUGS = (
    Bug(
        name="accelerate-4071",
        thread="huggingface/accelerate#4071",
        wrong="after set_epoch, skip_first_batches replays epoch 0",
        drills=(bad("accelerate==1.14.0", cause="sampler_epoch_not_set"), good("accelerate==1.15.0")),
    ),
    Bug(
        name="accelerate-4233",
        thread="huggingface/accelerate#4233",
        wrong="the epoch after a skipped one repeats its order: the guide's loop calls no set_epoch",
        drills=(bad("accelerate==1.15.0", cause="sampler_epoch_not_set"),),
    ),
    Bug(
        name="accelerate-3952",
        thread="huggingface/accelerate#3952",
        wrong="a stateful loader on two ranks goes back by the batches that were fetched ahead",
        drills=(bad("accelerate==1.12.0", cause="batches_repeated"), good("accelerate==1.13.0")),
    ),
    Bug(
        name="accelerate-4283",
        thread="huggingface/accelerate#4283",
        wrong="load_state passes over random states that it cannot read, as with torch 2.6 and newer: dropout draws again",
        drills=(bad("accelerate==1.0.1", cause="rng_not_restored"), good("accelerate==1.1.1")),
    ),
    Bug(
        name="diffusers-9764",
        thread="huggingface/diffusers#9764",
        wrong="EMAModel.from_pretrained brings back weights alone: decay and count of updates begin anew",
        drills=(bad("diffusers==0.31.0", cause="kept_state_not_restored"), good("diffusers==0.32.2")),
    ),
    Bug(
        name="accelerate-3306",
        thread="huggingface/accelerate#3306",
        wrong="load_state does not bring back the number of the next automatic name: states are saved as 0, 1, … again",
        drills=(bad("accelerate==1.15.0", cause="never_came_back"),),
    ),
    Bug(
        name="transformers-40690",
        thread="huggingface/transformers#40690",
        wrong="a Trainer resumed in its second epoch or later reads another epoch's order",
        drills=(
            bad(*TRANSFORMERS_4, cause="sampler_epoch_not_set"),
            Drill(of="first-epoch", releases=TRANSFORMERS_4, verdict="PASS", kills=((0, 6),)),
            good("transformers==5.0.0", "accelerate==1.14.0", *TRANSFORMERS_5),
        ),
    ),
    Bug(
        name="transformers-43708",
        thread="huggingface/transformers#43708",
        wrong="a restart with another micro-batch and the same global batch ends at half the steps",
        drills=(bad("transformers==5.1.0", "accelerate==1.15.0", *TRANSFORMERS_5, cause="ended_at_another_step"),),
    ),
    Bug(
        name="transformers-26413",
        thread="huggingface/transformers#26413",
        wrong="a resume in the second pass of a stream begins at its first record",
        drills=(bad("transformers==5.23.0", cause="batches_repeated"),),
    ),
    Bug(
        name="transformers-35782",
        thread="huggingface/transformers#35782",
        wrong="after a kill inside a save the newest checkpoint is incomplete, and every restart fails on it",
        drills=(bad("transformers==5.23.0", cause="never_came_back"),),
    ),
    Bug(
        name="transformers-optimizer",
        thread="huggingface/transformers#35782",
        wrong="a checkpoint without optimizer.pt is trained on from without a word",
        drills=(bad("transformers==5.23.0", cause="optimizer_state_not_restored"),),
    ),
    Bug(
        name="transformers-rng",
        thread="huggingface/transformers#35782",
        wrong="a checkpoint without rng_state.pth is trained on from without a word",
        drills=(bad("transformers==5.23.0", cause="rng_not_restored"),),
    ),
    Bug(
        name="datasets-8295",
        thread="huggingface/datasets#8295",
        wrong="the second resume of a stream begins at its start",
        drills=(
            Drill(of="one-kill", releases=("datasets==5.0.0", *DATASETS), verdict="PASS", kills=((0, 12),)),
            bad("datasets==5.0.0", *DATASETS, cause="batches_repeated"),
            good("datasets==5.0.1", *DATASETS),
        ),
    ),
    Bug(
        name="datasets-8145",
        thread="huggingface/datasets#8145",
        wrong="a resume behind .map() skips the rest of a thousand rows",
        drills=(bad("datasets==4.8.4", *DATASETS, cause="batches_skipped"), good("datasets==4.8.5", *DATASETS)),
    ),
    Bug(
        name="datasets-8360",
        thread="huggingface/datasets#8360",
        wrong="a resume behind a formatted .filter() loses rows",
        drills=(bad("datasets==5.0.0", *DATASETS, cause="batches_skipped"), good("datasets==5.0.1", *DATASETS)),
    ),
    Bug(
        name="datasets-7901",
        thread="huggingface/datasets#7901",
        wrong="the shuffle buffer of a stream is not part of its state: what it held is lost",
        drills=(bad("datasets==5.0.1", *DATASETS, cause="data_order_not_restored"),),
    ),
    Bug(
        name="datasets-7447",
        thread="huggingface/datasets#7447",
        wrong="behind lasting loader workers, the passes after the one that a restart went on in begin where that one did",
        drills=(bad("datasets==3.3.2", *DATASETS, cause="batches_skipped"), good("datasets==3.4.0", *DATASETS)),
    ),
    Bug(
        name="torchtitan-1357",
        thread="pytorch/torchtitan#1357",
        wrong="its loader goes through a stream again and again: after a load each pass begins where the loaded one stood",
        drills=(bad("datasets==5.0.1", *DATASETS, cause="batches_repeated"),),
    ),
    Bug(
        name="lightning-20953",
        thread="Lightning-AI/pytorch-lightning#20953",
        wrong="AsyncCheckpointIO saves tensors that later steps have changed",
        drills=(
            bad("pytorch-lightning==2.5.3", *LIGHTNING, cause="saved_while_training"),
            good("pytorch-lightning==2.5.4", *LIGHTNING),
        ),
    ),
    Bug(
        name="lightning-20379",
        thread="Lightning-AI/pytorch-lightning#20379",
        wrong="a checkpoint at the last step of an epoch counts its last batch as not done: it is trained on twice",
        drills=(
            bad("pytorch-lightning==2.4.0", *LIGHTNING, cause="batches_repeated"),
            good("pytorch-lightning==2.5.4", *LIGHTNING),
        ),
    ),
    Bug(
        name="lightning-stateful",
        thread="Lightning-AI/pytorch-lightning#20379",
        wrong="with a StatefulDataLoader a checkpoint at the last step of an epoch skips the next epoch (since 2.5)",
        drills=(
            bad("pytorch-lightning==2.6.0", *LIGHTNING, cause="ended_at_another_step"),
            good("pytorch-lightning==2.4.0", *LIGHTNING),
        ),
    ),
    Bug(
        name="lightning-rng",
        thread="Lightning-AI/pytorch-lightning#17543",
        wrong="no random stream is part of a checkpoint: dropout draws other masks after a resume",
        drills=(bad("pytorch-lightning==2.6.0", *LIGHTNING, cause="rng_not_restored"),),
    ),
    Bug(
        name="lightning-7637",
        thread="Lightning-AI/pytorch-lightning#7637",
        wrong="a ReduceLROnPlateau that is stepped after each step is stepped after the checkpoint is saved",
        drills=(bad("pytorch-lightning==2.6.0", *LIGHTNING, cause="lr_scheduler_of_another_step"),),
    ),
    Bug(
        name="lightning-21492",
        thread="Lightning-AI/pytorch-lightning#21492",
        wrong="reload_dataloaders_every_n_epochs counts from the restart: loaders are made anew at other epochs",
        drills=(bad("pytorch-lightning==2.6.0", *LIGHTNING, cause="batch_contents"),),
    ),
    Bug(
        name="litdata-318",
        thread="Lightning-AI/litData#318",
        wrong="after a load each pass of a StreamingDataLoader ends with the batches that the loaded one had left",
        drills=(bad("litdata==0.2.17", *LITDATA, cause="batches_repeated"), good("litdata==0.2.76", *LITDATA)),
    ),
    Bug(
        name="verl-7401",
        thread="verl-project/verl#7401",
        wrong="its loop over a StatefulDataLoader skips an epoch after a checkpoint at an epoch's last step",
        drills=(bad("torchdata==0.11.0", cause="ended_at_another_step"),),
    ),
    Bug(
        name="torchdata-1437",
        thread="meta-pytorch/data#1437",
        wrong="a StatefulDataLoader whose state was saved where an epoch ends gives an empty epoch next",
        drills=(bad("torchdata==0.10.1", cause="ended_at_another_step"), good("torchdata==0.11.0")),
    ),
    Bug(
        name="torchdata-1513",
        thread="meta-pytorch/data#1513",
        wrong="a SamplerWrapper's state brings back no epoch of the sampler: a later pass goes on in the first one's order",
        drills=(bad("torchdata==0.11.0", cause="batches_repeated"),),
    ),
    Bug(
        name="torchdata-1548",
        thread="meta-pytorch/data#1548",
        wrong="a Loader that was asked for its state before it was loaded begins at the start",
        drills=(bad("torchdata==0.11.0", cause="batches_repeated"),),
    ),
    Bug(
        name="pytorch-119168",
        thread="pytorch/pytorch#119168",
        wrong="a scheduler made after the optimizer was loaded sets its first rate for one step",
        drills=(Drill(of="bad", releases=("torch==2.13.0",), verdict="FAIL", cause="lr_scheduler_of_another_step"),),
    ),
    Bug(
        name="pytorch-43706",
        thread="pytorch/pytorch#43706",
        wrong="an optimizer's load_state_dict casts state to the parameters' dtype: what was kept in bfloat16 is float32",
        drills=(bad("prodigy-plus-schedule-free==2.0.0", cause="optimizer_state_not_restored"),),
    ),
    Bug(
        name="warmup-27",
        thread="ildoonet/pytorch-gradual-warmup-lr#27",
        wrong="what follows the warm-up comes out of the checkpoint with an optimizer of its own, and sets that one's rate",
        drills=(bad("warmup-scheduler==0.3", cause="lr_scheduler_not_restored"),),
    ),
    Bug(
        name="lookahead-237",
        thread="kozistr/pytorch_optimizer#237",
        wrong="a loaded Lookahead keeps its old param_groups: the scheduler sets those, and others are trained with",
        drills=(bad("pytorch-optimizer==3.0.0", cause="lr_scheduler_not_restored"), good("pytorch-optimizer==3.1.0")),
    ),
    Bug(
        name="lookahead-306",
        thread="kozistr/pytorch_optimizer#306",
        wrong="a Lookahead saves no slow weights: a restart mixes in the ones that the training began with",
        drills=(bad("pytorch-optimizer==3.3.0", cause="forward_pass"), good("pytorch-optimizer==4.1.0")),
    ),
    Bug(
        name="schedulefree-363",
        thread="kozistr/pytorch_optimizer#363",
        wrong="ScheduleFreeWrapper loads its state for tensors of the checkpoint's, and forgets that it was saved in eval mode",
        drills=(bad("pytorch-optimizer==3.8.0", cause="weights_not_restored"),),
    ),
    Bug(
        name="sam-73",
        thread="davda54/sam#73",
        wrong="the state dict of a SAM holds its own state, not that of the optimizer inside it, as in pytorch_optimizer",
        drills=(bad("pytorch-optimizer==3.8.0", cause="optimizer_state_not_restored"), good("pytorch-optimizer==4.1.0")),
    ),
    Bug(
        name="transformers-28544",
        thread="huggingface/transformers#28544",
        wrong="the patience of early stopping begins at 0 again after a resume: the training ends later",
        drills=(bad("transformers==5.23.0", cause="ended_at_another_step"),),
    ),
    Bug(
        name="torchrl-4089",
        thread="pytorch/rl#4089",
        wrong="the batches that a replay buffer has sampled ahead are not part of its state: they are skipped",
        drills=(bad("torchrl==0.13.3", *TENSORDICT, cause="batches_skipped"), good("torchrl==0.14.1", *TENSORDICT)),
    ),
    Bug(
        name="torchrl-4188",
        thread="pytorch/rl#4188",
        wrong="a checkpoint of its Trainer holds no state of the optimizer",
        drills=(
            bad("torchrl==0.13.3", *TENSORDICT, cause="optimizer_state_not_restored"),
            good("torchrl==0.14.1", *TENSORDICT),
        ),
    ),
)
