"""Rows of the table of causes: name and hint of the first difference between the legs. See `codes`."""

from collections.abc import Iterator, Mapping

from chaosrun.verify.code_data import DATA
from chaosrun.verify.row import Blame, Row, detail, ours, script

BESIDE = (
    "the step also uses something that no checkpoint holds: a loss scale, a counter, a buffer of earlier batches, the "
    "script's own generator or iterator ({kept})"
)
KEPT_BESIDE = (
    "the optimizer keeps something that its state_dict leaves out (slow weights, a counter), makes its step in another way "
    "(fused, foreach), or the loop changes weights using something that no checkpoint holds ({kept})"
)
_HASHES = detail(
    hint="the script depends on hash(), or on the order of a set{where}, and a new process hashes strings differently: what it "
    f"numbers, chooses or lists by hash changes with each process (sort the set). If sorting makes no difference, {BESIDE}",
    hazard="D21",
)
QUANTITIES: Mapping[str, str] = {"forward_pass": "loss", "gradient": "gradient", "optimizer_update": "update"}
"""By code, the quantity that differs although all observable state was restored."""
FRESHLY_SEEDED = "the random streams are as before step 1: freshly seeded instead of restored"


_OTHER_LOSS = script("it computes another loss from the same data, weights and random numbers", likely=True)
_OTHER_CHANGE = script("it changed the weights between two steps otherwise than without faults", likely=True)
_OTHER_GRADIENT = script("it computes another gradient from the same data, weights and loss")


_PLACE: Mapping[str, Row] = {
    "checkpoint_not_newest": Row(
        "another checkpoint restored",
        ours("another checkpoint restored, unless a hook of the script changes it on loading"),
        "rank {rank} restored {restored} instead of {ordered}, the newest committed checkpoint",
        "S6",
    ),
    "position_not_restored": Row(
        "position not restored",
        ours("position not restored, unless a hook of the script changes it on loading"),
        "the samples are right, but their position is not: epoch or number of batches done is wrong",
        "D13",
    ),
    "position_not_restored.start": detail(
        hint="rank {rank} {problem}: epoch, batches and steps must match; their counts were not restored as saved"
    ),
}
_STEP: Mapping[str, Row] = {
    "initial_weights": Row(
        "initial weights",
        script("its initial weights depend on something besides the seed"),
        "the job started with other weights: they depend on something besides the seed",
        "R4",
    ),
    "forward_pass": Row(
        "forward pass",
        _OTHER_LOSS,
        "same data, weights and RNG, another loss: a kernel is not deterministic, or the thread count differs",
        "K4",
    ),
    "forward_pass.hashes": _HASHES,
    "batch_contents.hashes": _HASHES,
    "data_order_not_restored.hashes": _HASHES,
    "forward_pass.passes": Row(
        "",
        script("a step made another number of forward passes than before, and as many backward passes", likely=True),
        "the step made {seen} forward passes instead of {expected}, and as many backward passes: what goes through the model "
        f"besides the loader's batch has changed: {BESIDE}; or a restart refills a cache: run passes that do not train under "
        "torch.no_grad(), where they do not count",
        "O8",
    ),
    "forward_pass.changed_between": Row(
        "weights changed differently between steps",
        _OTHER_CHANGE,
        hint="the script, or an optimizer wrapped around another, changes the weights between the steps (it averages, clips or "
        "swaps them), here with another result than in the reference run: no checkpoint holds what this depends on, or "
        f"{BESIDE}",
        hazard="O8",
    ),
    "forward_pass.drew_before": detail(
        hint="everything was restored as saved, yet the loss differs, and the random streams, equal before the step, differ "
        "after it: an evaluation or log in this attempt alone drew random numbers before the forward pass, or the model is in "
        f"another mode (model.train() was not called), or {BESIDE}",
        hazard="O8",
    ),
    "forward_pass.restored_right": detail(
        hint=f"everything was restored as saved, same data and RNG, another loss: {BESIDE}; or the model is in another mode "
        "(model.train() was not called), or its weights or buffers were changed after the restore, or its buffers are another "
        "rank's (save each rank's, unless DDP broadcasts them)",
        hazard="O8",
    ),
    "forward_pass.streams_at_rest": detail(
        hint="all but the random streams was restored as saved, and those are not the cause; same data, another loss: "
        f"{BESIDE}; or the model is in another mode (model.train() was not called), or its weights or buffers were "
        "changed after the restore",
        hazard="O8",
    ),
    "forward_pass.restored": detail(
        hint=f"same data, weights and RNG, another loss: {BESIDE}, or BatchNorm statistics; or a kernel is not deterministic",
        hazard="O8",
    ),
    "bucket_layout": Row(
        "gradient reduction (bucket layout)",
        ours("gradients were reduced in another order, unless the script wraps the model again after a restart", likely=True),
        "same data, weights and loss on every rank, another gradient sum: gradients were reduced in another bucket layout "
        "than before (buckets not primed)",
        "C1",
    ),
    "bucket_layout.wrapped": Row(
        "",
        script("it wraps its model otherwise after a restart", likely=True),
        "gradients were summed in another bucket layout ({apart} apart), although the buckets were primed in both runs: the "
        "restart gives DistributedDataParallel other settings (bucket_cap_mb, static_graph), or other parameters "
        "(requires_grad)",
        "C3",
    ),
    "gradient": Row(
        "gradient",
        _OTHER_GRADIENT,
        "same data, weights and loss, another gradient: a backward kernel is not deterministic",
        "K4",
    ),
    "gradient.first_after_restore": detail(
        hint=f"same data, weights and loss, another gradient right after a restore: {BESIDE}; or gradients accumulated before "
        "the checkpoint were lost (save at the end of a window), or stale ones were left, or zeros (set_to_none=False)",
        hazard="O8",
    ),
    "gradient.restored": detail(
        hint=f"same data, weights and loss, another gradient steps after a restore: {BESIDE}", hazard="O8"
    ),
    "other_optimizer_stepped": Row(
        "another optimizer stepped",
        script("which of its optimizers steps depends on something that no checkpoint holds", likely=True),
        "{seen} made the step, but {expected} did in the reference run: what decides whose turn it is (the script's own step "
        "count, a running loss) was not restored ({kept})",
        "O8",
    ),
    "learning_rate": Row(
        "learning rate",
        script("its learning rate depends on something that is not in the job's state"),
        "{where}: the schedule depends on something that is not in the job's state (the script's own counter or clock: "
        "{counted})",
        "O9",
    ),
    "lr_scheduler_not_restored.used": detail(hint="{where}: {scheduler}"),
    "optimizer_state_not_restored.update": detail(
        hint="same weights, gradients and learning rate, another update: the optimizer's moments were not restored"
    ),
    "optimizer_update": Row(
        "optimizer update",
        script("it makes another update from the same weights and gradients"),
        "same weights, gradients and learning rate, another update: the optimizer is not deterministic",
        "O6",
    ),
    "optimizer_update.first_after_restore": detail(
        hint="the optimizer was restored as saved, same gradients and learning rate, another update: its state, or a weight, "
        f"was changed after the restore, or {KEPT_BESIDE}"
    ),
    "optimizer_update.restored": detail(
        hint=f"same weights, gradients and learning rate, another update steps after a restore: {KEPT_BESIDE}"
    ),
}

PARTS: Mapping[str, str] = {
    "weights": "weights",
    "buffers": "buffers",
    "grad_scaler": "GradScaler",
    "learning_rate": "learning rate",
    "optimizer_settings": "optimizer settings",
    "optimizer_state": "optimizer state",
    "lr_scheduler": "LR scheduler",
    "registered_state": "registered state",
    "rng": "RNG",
}
"""The parts of a checkpoint: each may be restored wrongly in the same five ways."""
_NOT_RESTORED: Mapping[str, tuple[str, str]] = {
    "weights": ("the weights are not those saved", "S3"),
    "buffers": (
        "{name} is not as it was saved: BatchNorm statistics and other buffers belong to each rank (hazard C7), and the loss "
        "may never show them",
        "C7",
    ),
    "grad_scaler": ("the loss scale, or its count of steps without overflow, is not as it was saved", "O7"),
    "learning_rate": ("{name} was overwritten after the optimizer's state had been loaded", "O4"),
    "optimizer_settings": ("{name} was overwritten after the optimizer's state had been loaded (hazard O4)", "O4"),
    "optimizer_state": ("{name} is not as it was saved: the optimizer's moments or its step count are lost", "O3"),
    "lr_scheduler": ("{name} is not as it was saved: {scheduler}", "O10"),
    "registered_state": ("{name} is not as it was saved: load_state_dict left it out, or ran only on some ranks", "O8"),
    "rng": ("not at the position at which the checkpoint was saved: {streams}", "R2"),
}
_DRIFTED = {"weights": "S11", "optimizer_state": "O4", "lr_scheduler": "O9", "rng": "R7"}
_OF_ANOTHER_RANK = {"weights": "S11", "optimizer_state": "O4", "rng": "R8"}
_OF_ANOTHER_STEP = {"weights": "S6", "optimizer_state": "S8", "lr_scheduler": "S8", "rng": "S8"}
"""Hazards, if not the one for a part that is not restored."""
_OF_SCRIPT: Mapping[str, Blame] = {
    "learning_rate_not_restored": script("it changes the learning rate after the optimizer's state was loaded", likely=True),
    "optimizer_settings_not_restored": script("it changes the optimizer's settings after its state was loaded"),
    "lr_scheduler_not_restored": script("its learning rate scheduler is neither prepared nor registered", likely=True),
    "registered_state_not_restored": script(
        "load_state_dict of a registered object does not restore what its state_dict returned"
    ),
    "weights_of_another_rank": script("its ranks trained weights of their own, but chaosrun.attach saves rank 0's for all"),
    "optimizer_state_of_another_rank": script("its ranks held different optimizer states, but only one is saved for all"),
    "lr_scheduler_of_another_rank": script("its ranks held different schedules, but only one is saved for all"),
}
_HELD_BY_ALL = dict.fromkeys(("optimizer_state", "lr_scheduler"), "reduce what sets them") | {
    "weights": "replicas and shards alone can be restored: such a script needs checkpoints of its own"
}


def _of_parts() -> Iterator[tuple[str, Row]]:
    for part, words in PARTS.items():
        lost, hazard = _NOT_RESTORED[part]
        yield _state(f"{part}_not_restored", f"{words} not restored", f"{lost}{{scope}}", hazard)
        drifted = script(f"{words} drifted: it depends on something that no checkpoint holds")
        told = (
            "the steps up to {step} agree, but this does not: it depends on something that no checkpoint holds, or was "
            "changed outside the training steps{scope}"
        )
        yield f"{part}_drifted", Row(f"{words} drifted", drifted, told, _DRIFTED.get(part, hazard))
        held = _HELD_BY_ALL.get(part)
        of_all = f", saved for all: ranks held different ones ({held})" if held else ": another file was loaded"
        told = f"rank {{rank}} restored what rank {{other}} holds{of_all}{{scope}}"
        yield _state(f"{part}_of_another_rank", f"{words} of another rank", told, _OF_ANOTHER_RANK.get(part, hazard))
        told = "rank {rank} restored what it held after step {step}: another file was loaded{scope}"
        yield _state(f"{part}_of_another_step", f"{words} of another step", told, _OF_ANOTHER_STEP.get(part, hazard))
        told = (
            "all values are there, but under each other's names: parameters or objects changed their order (hazard O5){scope}"
        )
        yield _state(f"{part}_renamed", f"{words} under other names", told, "O5")


def _state(code: str, sentence: str, hint: str, hazard: str) -> tuple[str, Row]:
    ours_likely = ours(f"{sentence}, unless a hook of the script changes it on loading", likely=True)
    return code, Row(sentence, _OF_SCRIPT.get(code, ours_likely), hint, hazard)


_STATE_DETAILS: Mapping[str, Row] = {
    "weights_not_restored.unchanged": detail(
        hint="the weights are as the optimizer left them, but in the reference run the script changes them before its next "
        "step (it clips or rounds them, or copies them from others): they were saved before that, and the change was not "
        "made after loading"
    ),
    "weights_not_restored.partly": detail(
        hint="the weights are not those saved: the checkpoint was loaded in part, or changed"
    ),
    "weights_of_another_step.start": detail(hint="the weights are those after step {step}: another checkpoint was loaded"),
    "grad_scaler_not_restored.of_losses": detail(
        hint="every loss that differs is the expected one times the same power of two: a GradScaler's scale, or another factor "
        "that losses are multiplied by, is not as it was saved"
    ),
    "rng_not_restored.elsewhere": detail(hint="the random streams are not at the position at which the checkpoint was saved"),
    "rng_not_restored.freshly_seeded": detail(hint=f"{FRESHLY_SEEDED}{{scope}}"),
    "rng_drifted.drawn": detail(
        hint="something drew random numbers in one run only{which}: evaluation, logging, an iterator seeded from the global "
        "stream"
    ),
}

_OF_ONE_RANK = detail(
    hint="{returned} were restored as saved, but the {quantity} differs on {others} only: besides model and optimizer, "
    "{beside}, saved by rank {saver} and right there: load it on every rank, too (and save each rank's own, where ranks "
    "differ); or "
    f"{BESIDE}",
    hazard="O8",
)

_OF_OLDER_FILE = detail(
    hint="{returned} were restored as saved, but the {quantity} differs on {others} only: rank {other} had last saved a file "
    "of its own ({path}) after step {older}, not after step {base}: save each rank's at every checkpoint, and load those of "
    f"one step; or {BESIDE}",
    hazard="S8",
)
_OF_RANKS = {
    f"{code}.{variant}": row
    for code in ("forward_pass", "gradient", "optimizer_update")
    for variant, row in (("of_one_rank", _OF_ONE_RANK), ("of_older_file", _OF_OLDER_FILE))
}

DIFFERENCE_ROWS: Mapping[str, Row] = {**_OF_RANKS, **DATA, **_PLACE, **_STEP, **dict(_of_parts()), **_STATE_DETAILS}
