"""Rows of the table of causes: the state that attempts of a script that resumes by itself began with, and who is to blame. See
`codes`. `<code>.own` is the variant of a row for these scripts; `<code>` itself is for jobs that chaosrun restores."""

from collections.abc import Mapping

from chaosrun.verify.code_data import OF_EPOCH
from chaosrun.verify.code_streams import OF_OWN_RESUME, STREAM_ROWS
from chaosrun.verify.row import Blame, Row, detail, nobody, script

_MIXED = script("its own resume combines state of different steps")

_OF_NO_BATCH = (
    "the shuffle uses a seed or state that was not restored, or was drawn again; or one of several loaders lost its place; or "
    "the batch depends on state that was not restored (an environment, a memory of earlier steps, running means, sample "
    "weights, a hidden state, the script's own generator)"
)

_RESUME: Mapping[str, Row] = {
    "ranks_resume_apart": Row(
        "ranks resumed from different steps: attempt {attempt}: rank {rank} from step {step}, rank {other} from step {there}",
        script("its ranks do not agree on the checkpoint to resume from"),
        "let one rank choose a checkpoint that is complete on all ranks, and broadcast its choice",
        "S9",
    ),
    "resumed_state_differs": Row("attempt {attempt} began with {stood}", _MIXED),
    "began_again": Row(
        "started over from step 0 although a checkpoint existed: attempt {attempt} passed over that of step {newer} ({path})",
        script("its restart does not find its own checkpoint, or does not look for one"),
        "make the script look for its newest complete checkpoint on its own, or ask it to on a restart (resume.args, "
        "resume.env)",
        "S6",
    ),
    "began_again.read": Row(
        "started over from step 0 although it read a checkpoint: attempt {attempt} opened that of step {newer} ({path})",
        script("what it loads does not reach what it trains, or is itself the initial state", likely=True),
        "{path} was found and opened, yet training started as at step 0: the file holds nothing of what is trained (layers in "
        "a plain list do not belong to a model), is loaded into other objects or names (strict=False, a model or optimizer "
        "built afterwards), an error while loading is swallowed, or the file holds the initial weights and step count",
    ),
    "began_again.cut_off": Row(
        "",
        script("it takes a file whose save was cut off for its newest checkpoint"),
        "{cut_off} was opened, whose save a kill had cut off, and an error while loading it is swallowed: save under another "
        "name and rename the file once it is complete, and fall back to the newest checkpoint that loads",
    ),
    "checkpoint_passed_over": Row(
        "resumed from an older checkpoint: attempt {attempt} resumed from step {step} and passed over the complete checkpoint "
        "of step {newer} ({path})",
        script("it does not resume from the newest complete checkpoint"),
        "sort checkpoints by step as a number, not by name or time, and load the newest complete one, not the best",
        "S6",
    ),
    "newest_removed": Row(
        "the newest checkpoint had been removed: attempt {attempt} resumed from step {step}; that of step {newer} ({path}) "
        "was complete, but the script itself had removed it",
        script("it removes newer checkpoints than those it keeps"),
        "remove old checkpoints only after the new one is complete, sort them by step as a number, and always keep the newest, "
        "even if another is the best",
        "S6",
    ),
    "kept_state_not_restored": Row(
        "saved state besides the weights was not restored: {name}",
        script("its own resume does not restore everything that it saves", likely=True),
        "{where}: a restart has to load it, too (averaged weights, a counter, a best loss); if it does, restore also what it "
        "is updated from (an average's count of updates)",
        "O8",
    ),
    "kept_state_not_restored.made": Row(
        "a saved value is computed from state that was not restored: {name}",
        script("it computes what it saves from state that no checkpoint holds, so a restart started that over", likely=True),
        "{where}; no earlier save held it, so it could not be loaded: save what it is computed from (averaged weights, a list "
        "of losses, a best value) with the checkpoint, and restore it",
    ),
    "kept_state_not_restored.when": Row(
        "what decides when it is saved was not restored: {name}",
        script("its own resume does not restore what decides when it saves", likely=True),
        "{where}: what decides that (a count of steps, a best value, a list of the best, a number in the name) changed with "
        "the restart: save it with the checkpoint, and restore it",
    ),
    "kept_state_not_restored.left": detail(
        hint="{where}: a restart changed what it is computed from, or what decides when it is saved (averaged weights, a best "
        "value, a list of the best, a count)"
    ),
    "result_differs": Row(
        "a file that the script writes differs: {name}",
        script("it computes what it writes from state that no checkpoint holds, so a restart started that over", likely=True),
        "{where}, although the training was restored: call run.register(name, object) before the loop to save and restore "
        "what it is computed from (averaged weights, a best loss)",
        "O8",
    ),
    "result_differs.outside": detail(
        hint="{where}, although the training was restored: the training changes state that no checkpoint holds: {what:6}; call "
        "run.register(name, object) before the loop to save and restore it"
    ),
    "saved_while_training": Row(
        "the save of step {base} holds tensors of step {step}",
        script("it saves in the background while training changes the tensors"),
        "{path} was written by another thread while training continued: copy the tensors first, or wait until they are written",
        "S11",
    ),
    "never_came_back": Row(
        "never recovered after {fault}: {message}",
        script("it cannot resume from what a fault leaves behind, and does not fall back to an older checkpoint", likely=True),
        "write a checkpoint under a temporary name, rename it once it is complete, and fall back to an older one if the "
        "newest cannot be read",
        "S1",
    ),
    "never_came_back.whole": Row(
        "",
        script("it raises at a restart, although none of its saves was seen to be cut short", likely=True),
        "what it builds after a restart does not match what it saved, or it misreads what the first start left behind",
    ),
    "never_came_back.refused": Row(
        "never recovered after {fault}: torch.load refuses its checkpoint, which holds {what}",
        script("its torch.load refuses what it saved itself, although no save was seen to be cut short"),
        "since torch 2.6 torch.load accepts only tensors and plain values by default, but the checkpoint holds {what}: load "
        "it with weights_only=False (your own file; in a library, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1), or save plain values",
    ),
    "never_came_back.unset": Row(
        "",
        script("after a restart it reads a variable that it has never set", likely=True),
        "what sets the variable runs only at a first start, or in a loop that had no batch left (a checkpoint at the end of an "
        "epoch): set it before that loop, or resume such a checkpoint at the next epoch",
    ),
    "never_came_back.later": Row(
        "trained on after {fault}, but did not reach the end: {message}",
        script("it raises in steps after a restart that succeed in the reference run", likely=True),
        "it meets a file or folder of the killed attempt (save the same step again with exist_ok=True, overwrite it or set it "
        "aside), or what it has counted, named or kept since its start (the number of the next file, a list of steps, a queue, "
        "what an optimizer around another keeps by parameter) changed with the restart: save it with the checkpoint, and "
        "restore it",
    ),
    "raises_after_restart": Row(
        "fails at every restart after {fault}: {message}",
        script(
            "something it needs is missing after a restart: no checkpoint holds it, or it starts over as at step 0", likely=True
        ),
        "call run.register(name, object) before the loop to save and restore what its state_dict() holds; derive whatever "
        "else depends on the starting point from run.position",
        "O8",
    ),
    "never_saves": Row(
        "bit-identical to the reference run, but every restart began at step 0: the script was never seen to save: "
        "{steps:step} on {ranks:rank}, {faults:fault}",
        nobody("the job recovered exactly, by training all over again"),
        "no resume was tested: make the script save checkpoints and resume from them; if it does save, name the place "
        "(outputs)",
    ),
    "hook_state_not_restored": Row(
        "state of DDP's communication hook not restored",
        script("its checkpoint does not restore what the hook keeps from step to step", likely=True),
        "save and load the state of {hook} with the checkpoint, on every rank; if it does, DDP differs by itself: it rebuilds "
        "its buckets in each process's first step, which a state by bucket (PowerSGD's) does not follow, and which changes "
        "sums at three and more ranks (find_unused_parameters=True never rebuilds)",
    ),
    "damaged.taken": Row(
        "",
        script("it resumed from what {damage} had damaged, and took it for intact", likely=True),
        "the damaged file was loaded without an error: store a digest beside each file, check it before loading, and fall "
        "back to an older checkpoint if it differs",
    ),
    "beside.saved": detail(hint="besides model and optimizer, {also_saved}, which a restart must also load", hazard="O8"),
    **dict.fromkeys(
        ("batches_skipped.on_some_ranks", "batches_repeated.on_some_ranks"),
        detail(
            hint="{right} resumed at the right place in the data, {others} at a wrong one, perhaps rank 0's: each rank has its "
            "own place (save it for every rank, and let each load its own)"
        ),
    ),
    **dict.fromkeys(
        ("batches_skipped.each_pass", "batches_repeated.each_pass"),
        detail(
            hint="the restart was right to the end of its first pass over the data, but began the next with the batches of "
            "step {step}, batch {index} of epoch {epoch}: skip the batches already done (by a count or a loaded state) only "
            "in the pass in which the checkpoint was saved"
        ),
    ),
    "library.known": Row("", Blame(whose="library", likely=True, reason="{known}")),
}
_TOLD = (
    "a sampler that has set_epoch (DistributedSampler) needs it called every epoch, counting on from the checkpoint's "
    "(passing the finished epoch instead of the next repeats it)"
)
_DRAWN = (
    "an order drawn from a random stream (shuffle=True, RandomSampler) needs that stream's state, saved when the epoch begins "
    "and restored before the loader is iterated (torch.get_rng_state, or the loader's generator), or a generator seeded by "
    "the epoch"
)
_COUNTED = "a source that counts its own passes needs that count restored (a loader with a state_dict: save and load that)"
_BY_LIBRARY: Mapping[str, Row] = {
    "sampler_epoch_not_set.accelerate": detail(
        hint=f"{OF_EPOCH}: call set_epoch in every epoch, also on a loader that skips; accelerate passes it to a sampler that "
        "has an epoch, Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)); any other draws "
        "from a random stream that starts over at a restart"
    ),
    "sampler_epoch_not_set.lightning-fabric": detail(
        hint=f"{OF_EPOCH}: before each pass, set the epoch of the loader that Fabric made (loader._num_iter_calls = epoch)"
    ),
    "sampler_epoch_not_set.transformers": detail(
        hint=f"{OF_EPOCH}: Trainer sets the epoch where the sampler has one; any other (group_by_length, the script's own "
        "without set_epoch) draws from a random stream that starts over at a restart"
    ),
    "batches_repeated.transformers": detail(
        hint="the samples seen are those expected at step {step}, batch {index} of epoch {epoch}: {batches:batch} repeated, "
        "because Trainer was told to skip nothing (ignore_data_skip=True)"
    ),
    "optimizer_state_not_restored.transformers": detail(
        hint="the optimizer started new, with the weights of step {base}: Trainer saved no optimizer "
        "(save_only_model=True){scope}"
    ),
}
"""Advice for users of a library, by code, if the script trains with it."""
_BY_HAND = (
    "the script sets it without a torch scheduler, or with one that it builds while training, from something that a restart "
    "does not restore or counts differently (a count of steps or epochs, the steps left, a best loss): save that with the "
    "checkpoint, and restore it"
)
OF_RATES: Mapping[str, tuple[str, str]] = {
    "of_the_beginning": (
        "the learning rate is the initial one",
        "the scheduler, or the optimizer's rate, was not restored, or was saved before the scheduler's first step{scope}",
    ),
    "of_none": (
        "no step had this learning rate",
        "the scheduler was not restored, or counts differently after a restart{scope}",
    ),
    "begun_anew": (
        "the schedule started over, from the learning rate that the optimizer had kept",
        "the scheduler was not restored: {scheduler}",
    ),
    "late": (
        "the learning rate is right at first, but then changes at a wrong step, or never",
        "what its schedule counts or compares with (a best loss, a patience) was not restored, or was saved too early: "
        "{scheduler}",
    ),
    "counted_twice": (
        "the learning rate is right at first, but then ahead by as many steps as had been done before the restart",
        "these steps are counted twice: by the scheduler's loaded state, and by what the script adds to it (an offset in a "
        "LambdaLR's function, a last_epoch, scheduler steps that are replayed){scope}",
    ),
    "of_several": ("the learning rate is that of other steps", "its schedule is at the wrong place: {scheduler}"),
}
"""What learning rates show, and the reason if a torch scheduler sets them."""


_STATES: Mapping[str, Row] = {
    "sampler_epoch_not_set.either": Row("an earlier epoch's order again", hint=f"{OF_EPOCH}: {_TOLD}; {_DRAWN}; {_COUNTED}"),
    "streams.lost": detail(
        hint="the random streams are not where they should be, and an order may be drawn from them (torch.get_rng_state, or "
        "the loader's generator: save it when the epoch begins, and restore it before the loader is iterated)"
    ),
    "sampler_epoch_ahead.own": Row(
        "a later epoch's order",
        hint=f"{OF_EPOCH}: epochs were counted twice, or the random stream that the order is drawn from was saved after the "
        "next epoch had begun{by_all}",
    ),
    "data_order_not_restored.own": Row(
        "",
        script("it does not resume with the data that come next", likely=True),
        "the data are those of step {step}, expected were those of step {base}{scope}: the loader, or its sampler, was not "
        "restored to its place (call set_epoch before the epoch's first batch, skip the batches already done, or load the "
        "loader's state)",
    ),
    "batches_repeated.as_drawn": detail(
        hint="the samples seen are those expected at step {step}, batch {index} of epoch {epoch}, and the random streams match "
        "that step, too: the batches already done were not skipped (skip them, or save and load the state of the loader), "
        "or what draws, mixes or augments them started over with the streams (save and restore the random state of every "
        "rank, NumPy's and Python's too)"
    ),
    "data_order_not_restored.of_none": detail(hint=f"no recorded step began with this batch: {_OF_NO_BATCH}{{scope}}"),
    "data_order_not_restored.of_the_beginning": detail(
        hint="the data start from the beginning: the batches already done were not skipped{scope}"
    ),
    "weights_not_restored.of_none": detail(
        hint="the weights match no step: saved or loaded in part (frozen ones count), rounded, saved in a form other than the "
        "trained one (an average, an optimizer's eval mode), or changed after loading{scope}"
    ),
    "weights_not_restored.in_part": detail(
        hint="still as before step 1, while all other weights are those of step {base}: {name:3}: not in the checkpoint, under "
        "another name there, or skipped when loading (strict=False){scope}"
    ),
    "weights_not_restored.of_no_model": detail(
        hint="the optimizer updates tensors that no model has any more: its model got new ones after the optimizer was built "
        "(load_state_dict(assign=True), a model built or loaded again), so the weights that the model uses are not "
        "trained (load in place, or build the optimizer afterwards){scope}"
    ),
    "weights_not_restored.of_more": detail(
        hint="the model has parameters that it had not at its first start ({name:3}): layers no longer share one (tie them "
        "again after loading), or it is built otherwise{scope}",
        hazard="S10",
    ),
    "weights_not_restored.of_the_beginning": detail(
        hint="the weights are the initial ones: nothing was loaded into them (strict=False passes over names with another "
        "prefix, as module. or _orig_mod.){scope}"
    ),
    "weights_of_another_step.own": Row(
        "",
        script("the weights it loads are from a different step than the rest of its checkpoint"),
        "weights of step {step}, all else of step {base}{scope}: a background save whose tensors training changed meanwhile "
        "(copy them first), or files of two checkpoints were mixed",
        "S11",
    ),
    "optimizer_state_not_restored.of_the_beginning": detail(
        hint="the optimizer started new, with the weights of step {base}: its state was not saved, or not loaded{scope}"
    ),
    "optimizer_state_not_restored.of_none": detail(
        hint="the optimizer's state matches no step, with the weights of step {base}: loaded in part, in another order, "
        "cast on loading (load_state_dict casts it to the parameters' dtype), or still the zeros that dcp makes for it{scope}"
    ),
    "optimizer_state_not_restored.of_some": detail(
        hint="the optimizer {which} started with another state than the script had when it saved (the weights are of step "
        "{base}, and its other optimizers were restored): its state was not saved, or not loaded, or another optimizer's "
        "was loaded{scope}"
    ),
    "optimizer_state_of_another_step.own": detail(
        hint="the optimizer's state of step {step}, weights of step {base}: of two checkpoints, or saved late without a "
        "copy{scope}"
    ),
    "optimizer_settings_not_restored.own": Row(
        "",
        script("its own resume does not restore the optimizer's settings, or what sets them", likely=True),
        "{name} has changed: param_groups were not loaded, or were overwritten afterwards; or the script, or the optimizer "
        "itself, keeps setting it from something that started over (a count of steps): save that with the checkpoint, and "
        "restore it{scope}",
    ),
    "buffers_not_restored.own": Row(
        "",
        script("its own resume does not restore the model's buffers", likely=True),
        "changed: {name}; save each rank's BatchNorm statistics and other buffers with the checkpoint; the training loss "
        "never shows them (hazard C7)",
    ),
    "buffers_not_restored.at_start": detail(
        hint="a restart starts with other buffers than the run had when it saved ({name:3}){scope}: not in the checkpoint, or "
        "not loaded (skipped by strict=False, left out of state_dict)"
    ),
    "lr_scheduler_of_another_step.own": detail(
        hint="the learning rate is that of step {step}, not of step {base}: its scheduler's state or the optimizer's "
        "param_groups were not loaded, or were saved before the scheduler's own step, or a scheduler built after the "
        "optimizer was loaded has reset the rate to its first, or stepped it once more (its last_epoch is one too high){scope}"
    ),
    "lr_scheduler_of_another_step.by_hand": Row(
        "learning rate of another step",
        hint=f"the learning rate is that of step {{step}}, not of step {{base}}: {_BY_HAND}{{scope}}",
    ),
    "lr_scheduler_not_restored.own": Row("", OF_OWN_RESUME, "{where}: {scheduler}"),
    "lr_scheduler_not_restored.still": Row(
        "learning rate no longer changes",
        hint="the learning rate stays what it was when the restart began, but keeps changing in the reference run: its "
        "scheduler sets the rate of another optimizer than the one that trains (one unpickled with the scheduler's state, "
        "param_groups that load_state_dict replaced below a wrapper, an optimizer built again), is no longer stepped, or "
        "waits for something that was not restored (a best loss, a patience); or the script sets it without a scheduler, "
        "from something that a restart does not restore (a count of steps or epochs){scope}",
    ),
    "lr_scheduler_not_restored.by_hand": Row("learning rate not restored", hint=f"{{seen}}: {_BY_HAND}{{scope}}"),
    **{
        f"lr_scheduler_not_restored.{because}": detail(hint=f"{seen}: {follows}")
        for because, (seen, follows) in OF_RATES.items()
    },
    "ended_at_another_step.own": Row(
        "",
        script("its end condition, or how it counts, differs after a restart"),
        "a restart counts steps, epochs or batches differently from the first start: other arguments, another batch size, an "
        "epoch left out or done again, samples of a stream's buffer lost (save a best loss, patience and clocks with the "
        "checkpoint, too)",
    ),
    "bucket_layout.own": Row(
        "",
        Blame(whose="library", reason="torch's DDP rebuilds its buckets in each process's first step, also without chaosrun"),
        "DDP rebuilt its buckets: its first step after a restart sums gradients in another order, {apart} apart, at three and "
        "more ranks also without chaosrun (find_unused_parameters=True never rebuilds; prime_buckets: true shows what else "
        "differs)",
    ),
}

RESUME_ROWS: Mapping[str, Row] = {**_RESUME, **STREAM_ROWS, **_STATES, **_BY_LIBRARY}
