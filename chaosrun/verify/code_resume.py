"""Rows of the table of causes: what the attempts of a script that resumes by itself began with, and who is at fault. See
`codes`. `<code>.own` is the row of a code that has another row for jobs that chaosrun restores."""

from collections.abc import Iterator, Mapping

from chaosrun.verify.blame import Blame, Row, detail, nobody, script
from chaosrun.verify.code_differences import BESIDE, DIFFERENCE_ROWS, OF_EPOCH
from chaosrun.verify.code_streams import OWN, STREAM_ROWS

_MIXED = script("its own resume combines state of different steps")

_BESIDE = detail(
    hint="{returned} were restored as they were saved, but the {quantity} differs: beside model and "
    f"optimizer {{beside}}, which a restart has to load, too; if it does, {BESIDE}",
    hazard="O8",
)

_OF_NO_BATCH = (
    "the shuffle follows a seed or a state that was not restored, or was drawn anew, or a batch is made of several loaders, of "
    "which one lost its place, or of what did not come back (an environment, a memory of earlier steps, running means, weights "
    "of samples, a hidden state, a generator of the script's own)"
)

_OF_ONE_RANK = detail(
    hint="{returned} were restored as they were saved, but the {quantity} differs on {others} alone: beside model and "
    f"optimizer {{beside}}, as rank {{saver}} had it, which is right: each rank has its own (save that of each); or {BESIDE}",
    hazard="O8",
)

_RESUME: Mapping[str, Row] = {
    "ranks_resume_apart": Row(
        "ranks went on from different steps: attempt {attempt}: rank {rank} from step {step}, rank {other} from step {there}",
        script("its ranks do not agree on the checkpoint to go on from"),
        "have one rank choose the checkpoint and tell the others, and choose one that is complete on all of them",
        "S9",
    ),
    "resumed_state_differs": Row("attempt {attempt} began with {stood}", _MIXED),
    "began_again": Row(
        "began again from step 0 although a checkpoint was there: attempt {attempt} passed over that of step {newer} ({path})",
        script("its restart does not find its own checkpoint, or does not look for one"),
        "have the script look for its newest complete checkpoint by itself, or tell a restart to (resume.args, resume.env)",
        "S6",
    ),
    "began_again.read": Row(
        "began again from step 0 although it read a checkpoint: attempt {attempt} opened that of step {newer} ({path})",
        script("what it loads does not reach what it trains, or counts as the beginning", likely=True),
        "{path} was found and opened, and the training began as at step 0: it holds none of what is trained (layers in a plain "
        "list are no part of a model), goes into other objects or names (strict=False, a model or an optimizer built "
        "afterwards), an error of the load is caught, or weights and count in it are those of the beginning",
    ),
    "checkpoint_passed_over": Row(
        "an older checkpoint was gone on from: attempt {attempt} went on from step {step} and passed over the complete "
        "checkpoint of step {newer} ({path})",
        script("it does not go on from the newest checkpoint that is complete"),
        "order checkpoints by their step as a number, not by name or time, and take the newest that is complete",
        "S6",
    ),
    "newest_removed": Row(
        "the newest checkpoint had been removed: attempt {attempt} went on from step {step}; that of step {newer} ({path}) was "
        "complete, and the script removed it itself",
        script("it removes checkpoints that are newer than those it keeps"),
        "order checkpoints by their step as a number when old ones are removed, and keep the newest, whichever is the best",
        "S6",
    ),
    "kept_state_not_restored": Row(
        "what is saved beside the weights was not restored: {name}",
        script("its own resume does not bring back all that it saves", likely=True),
        "{where}: a restart has to load it, too (an average of the weights, a counter, a best loss); where it does, what "
        "changes it has to come back as well (how often an average was updated)",
        "O8",
    ),
    "kept_state_not_restored.made": Row(
        "what is saved is made of something that was not restored: {name}",
        script("what it saves is made of something that no checkpoint holds, so a restart began it anew", likely=True),
        "{where}; no earlier save held it, to be loaded: what it is made of (an average of the weights, a list of losses, a "
        "best value) has to be saved with the checkpoint, and loaded again",
    ),
    "kept_state_not_restored.when": Row(
        "what decides when it is saved was not restored: {name}",
        script("its own resume does not bring back what it saves by", likely=True),
        "{where}: what decides that (a count of steps, a best value, a list of the best, a number in the name) is not after a "
        "restart what it was before: save it with the checkpoint, and load it again",
    ),
    "kept_state_not_restored.left": detail(
        hint="{where}: what it is made of, or what decides when it is saved (an average of the weights, a best value, a list "
        "of the best, a count), is not after a restart what it was before"
    ),
    "result_differs": Row(
        "a file that the script writes differs: {name}",
        script("what it writes is made of something that no checkpoint holds, so a restart began it anew", likely=True),
        "{where}, although the training came back: run.register(name, object) before the loop saves and restores what it is "
        "made of (an average of the weights, a best loss)",
        "O8",
    ),
    "result_differs.outside": detail(
        hint="{where}, although the training came back: the training changes what no checkpoint holds: {what:6}; "
        "run.register(name, object) before the loop saves and restores it"
    ),
    "saved_while_training": Row(
        "the save of step {base} holds tensors of step {step}",
        script("it saves in the background while training changes what it saves"),
        "{path} was written by another thread while training went on: copy the tensors before, or wait until they are written",
        "S11",
    ),
    "never_came_back": Row(
        "never came back after {fault}: {message}",
        script("it cannot go on from what a fault leaves behind, and falls back to nothing older", likely=True),
        "a checkpoint counts only when it is whole: write it beside, rename it at last, and fall back to an older one where "
        "the newest cannot be read",
        "S1",
    ),
    "never_came_back.whole": Row(
        "",
        script("it raises at a restart, although no save of its own was seen to be cut short", likely=True),
        "what it builds after a restart does not fit what it saved, or it takes what the first start left behind for "
        "something else",
    ),
    "never_came_back.refused": Row(
        "never came back after {fault}: torch.load refuses its checkpoint, which holds {what}",
        script("its torch.load refuses what it saved itself, although no save was seen to be cut short"),
        "since torch 2.6 torch.load takes nothing but tensors and plain values, and the checkpoint holds {what}: load it "
        "with weights_only=False (as it is your own), or save plain values in its place",
    ),
    "never_came_back.unset": Row(
        "",
        script("after a restart it reads a variable that it has never set", likely=True),
        "what sets the variable runs only at a first start, or in a loop that had no batch left (a checkpoint at the end of an "
        "epoch): set it before that loop, or resume such a checkpoint at the next epoch",
    ),
    "never_came_back.later": Row(
        "trained on after {fault}, and did not come to its end: {message}",
        script("it raises in steps that follow a restart, which undisturbed it does not", likely=True),
        "what it counts or names since its start (a number of the next file, a list of steps, a queue) is not after a restart "
        "what it was before: save it with the checkpoint, and load it again",
    ),
    "raises_after_restart": Row(
        "fails at every restart after {fault}: {message}",
        script("what it needs after a restart is not there: no checkpoint holds it, or it begins as at step 0", likely=True),
        "run.register(name, object) before the loop saves and restores what its state_dict() holds; what else depends on where "
        "the training begins can follow run.position",
        "O8",
    ),
    "never_saves": Row(
        "bit-identical to the undisturbed run, but every restart began at step 0: the script was never seen to save: "
        "{steps:step} on {ranks:rank}, {faults:fault}",
        nobody("the job came back exactly, by training all over again"),
        "nothing was shown of a resume: have the script save checkpoints and go on from them; where it does save, name the "
        "place (outputs)",
    ),
    "hook_state_not_restored": Row(
        "state of DDP's communication hook not restored",
        script("its checkpoint does not bring back what the hook keeps from step to step", likely=True),
        "save and load the state of {hook} with the checkpoint, on every rank; at three and more ranks DDP, which rebuilds its "
        "buckets in a process's first step, differs beside it (find_unused_parameters=True never rebuilds)",
    ),
    "damaged.taken": Row(
        "",
        script("it went on from what {damage} had damaged, and took it for whole", likely=True),
        "what was damaged was loaded without an error: keep a digest beside each file, compare it before it is loaded, and "
        "fall back to an older checkpoint where it differs",
    ),
    "beside.saved": _BESIDE,
    **dict.fromkeys((f"{code}.of_one_rank" for code in ("forward_pass", "gradient", "optimizer_update")), _OF_ONE_RANK),
    **dict.fromkeys(
        ("batches_skipped.on_some_ranks", "batches_repeated.on_some_ranks"),
        detail(
            hint="in its data {right} went on from the right place, {others} from a wrong one, rank 0's perhaps: each rank has "
            "a place of its own (save that of each, and load a rank's own)"
        ),
    ),
    **dict.fromkeys(
        ("batches_skipped.each_pass", "batches_repeated.each_pass"),
        detail(
            hint="the restart went on rightly to the end of a pass, and began the next with the batches of step {step}, batch "
            "{index} of epoch {epoch}: what skips the batches that were done (a count, a state that was loaded) has to end "
            "with the pass that it was saved in"
        ),
    ),
    "library.known": Row("", Blame(whose="library", likely=True, reason="{known}")),
}
_TOLD = (
    "a sampler that has set_epoch (DistributedSampler) has to be told each epoch, counted on from the checkpoint's (one that "
    "tells the epoch that is done, and not the next, has it done again)"
)
_DRAWN = (
    "an order that is drawn from a random stream (shuffle=True, RandomSampler) comes back with that stream, saved as it stands "
    "when an epoch begins and restored before the loader is opened (torch.get_rng_state, or the loader's generator), or with a "
    "generator that is seeded by the epoch"
)
_COUNTED = "a source that counts its own passes has to be given their count"
_BY_LIBRARY: Mapping[str, Row] = {
    "sampler_epoch_not_set.accelerate": detail(
        hint=f"{OF_EPOCH}: call set_epoch in every epoch, of a loader that skips, too; accelerate hands it to a sampler that "
        "has an epoch, Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)); another draws "
        "from a random stream that a restart begins anew"
    ),
    "sampler_epoch_not_set.accelerate_drawn": detail(
        hint=f"{OF_EPOCH}, and the random streams do not stand where they should: {_DRAWN}; accelerate has such a generator, "
        "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)): call set_epoch in every epoch"
    ),
    "sampler_epoch_not_set.lightning-fabric": detail(
        hint=f"{OF_EPOCH}: tell the loader that Fabric made which pass it is, before each (loader._num_iter_calls = epoch)"
    ),
    "sampler_epoch_not_set.transformers": detail(
        hint=f"{OF_EPOCH}: Trainer sets the epoch where the sampler has one; another (group_by_length, one of the script's own "
        "without set_epoch) draws from a random stream that a restart begins anew"
    ),
    "batches_repeated.transformers": detail(
        hint="the samples seen are those expected at step {step}, batch {index} of epoch {epoch}: {batches:batch} repeated, as "
        "Trainer does that is told to skip nothing (ignore_data_skip=True)"
    ),
    "optimizer_state_not_restored.transformers": detail(
        hint="the optimizer began as new, with the weights of step {base}: Trainer saved none (save_only_model=True){scope}"
    ),
}
"""What the users of a library can do: of a code, where the script trains with it."""
_BY_HAND = (
    "the script sets it without a scheduler of torch's, or by one that it makes as it trains, by something that a restart does "
    "not bring back, or counts otherwise (a count of steps or epochs, the steps that are left, a best loss): save it with the "
    "checkpoint, and load it again"
)
OF_RATES: Mapping[str, tuple[str, str]] = {
    "of_the_beginning": (
        "the learning rate is that of the beginning",
        "the scheduler, or the rate that the optimizer keeps, was not restored, or was saved before the scheduler's first step"
        "{scope}",
    ),
    "of_none": ("no step had this learning rate", "the scheduler was not restored, or counts otherwise after a restart{scope}"),
    "begun_anew": (
        "the learning rate goes on from the one that the optimizer kept as it went on from the first",
        "the scheduler was begun anew: {scheduler}",
    ),
    "late": (
        "the learning rate is right at first, and then changes at another step than it should, or at none",
        "what its schedule counts, or compares with (a best loss, a patience), did not come back, or was saved too early: "
        "{scheduler}",
    ),
    "counted_twice": (
        "the learning rate is right at first, and then that of as many steps later as were done when the restart began",
        "these steps are counted twice: by the scheduler's state that was loaded, and by what the script adds to it (an offset "
        "in the function of a LambdaLR, a last_epoch, steps that are taken again){scope}",
    ),
    "of_several": ("the learning rate is that of other steps", "its schedule does not stand where it should: {scheduler}"),
}
"""What is seen of learning rates, and what it comes of where a scheduler of torch's sets them."""


_STATES: Mapping[str, Row] = {
    "sampler_epoch_not_set.either": Row("an earlier epoch's order again", hint=f"{OF_EPOCH}: {_TOLD}; {_DRAWN}; {_COUNTED}"),
    "sampler_epoch_not_set.drawn": Row(
        "an earlier epoch's order again",
        hint=f"{OF_EPOCH}, and the random streams do not stand where they should: {_DRAWN}; {_COUNTED}; {_TOLD}",
    ),
    "sampler_epoch_ahead.own": Row(
        "a later epoch's order",
        OWN,
        f"{OF_EPOCH}: epochs were counted twice, or the random stream that the order is drawn from was saved after the next "
        "epoch had begun{by_all}",
    ),
    "data_order_not_restored.own": Row(
        "",
        script("the data it goes on with are not those that come next", likely=True),
        "the data are those of step {step}, expected were those of step {base}{scope}: the loader, or its sampler, has not "
        "come back to its place (set_epoch before the epoch's first batch, the batches done skipped, a loader's state loaded)",
    ),
    "batches_skipped.before_update": detail(
        hint="data and random streams stand where they stood a step after weights and optimizer: the checkpoint was saved "
        "before the optimizer's step, and counts it as done (save after the step, or count it later)"
    ),
    "batches_repeated.as_drawn": detail(
        hint="the samples seen are those expected at step {step}, batch {index} of epoch {epoch}, and the random streams stand "
        "there, too: those already done were not skipped (skip them, or save and load the state of the loader), or what draws, "
        "mixes or augments them began anew with the streams (save the random states of every rank, NumPy's and Python's too, "
        "and restore them)"
    ),
    "data_order_not_restored.of_none": detail(hint=f"no recorded step began with this batch: {_OF_NO_BATCH}{{scope}}"),
    "data_order_not_restored.beside": detail(
        hint="no recorded step began with this batch, although model, optimizer and random streams were restored as they were "
        f"saved: beside model and optimizer {{beside}}, which a restart has to load, too; if it does, {_OF_NO_BATCH}{{scope}}"
    ),
    "data_order_not_restored.of_the_beginning": detail(
        hint="the data begin at their beginning: nothing has skipped the batches that were done{scope}"
    ),
    "weights_not_restored.of_none": detail(
        hint="the weights are those of no step: saved or loaded in part (frozen ones count), rounded, saved in another form "
        "than they are trained in (an average, an optimizer's eval mode), or changed after loading{scope}"
    ),
    "weights_not_restored.in_part": detail(
        hint="as before step 1, while all other weights are those of step {base}: {name:3}: not in the checkpoint, there under "
        "another name, or passed over by what loads it (strict=False){scope}"
    ),
    "weights_not_restored.of_no_model": detail(
        hint="the optimizer steps tensors that no model has any more: its model was given others after the optimizer was built "
        "(load_state_dict(assign=True), a model that was built or loaded anew), so it does not train what the model computes "
        "with (load in place, or build the optimizer afterwards){scope}"
    ),
    "weights_not_restored.of_the_beginning": detail(
        hint="the weights are the initial ones: nothing was loaded into them{scope}"
    ),
    "weights_of_another_step.own": Row(
        "",
        script("the weights it loads are of another step than the rest of its checkpoint"),
        "weights of step {step}, all else of step {base}{scope}: a save that goes on in the background while training changes "
        "what it saves (copy the tensors before), or files of two checkpoints were mixed",
        "S11",
    ),
    "optimizer_state_not_restored.of_the_beginning": detail(
        hint="the optimizer began as new, with the weights of step {base}: its state was not saved, or not loaded{scope}"
    ),
    "optimizer_state_not_restored.of_none": detail(
        hint="the optimizer's state is that of no step, with the weights of step {base}: loaded in part, in another order, or "
        "cast on loading (torch's load_state_dict gives state the parameters' dtype, whatever it was){scope}"
    ),
    "optimizer_state_not_restored.of_some": detail(
        hint="the optimizer {which} began otherwise than it stood when the script saved (the weights are of step {base}, and "
        "its other optimizers came back): its state was not saved, or not loaded{scope}"
    ),
    "optimizer_state_of_another_step.own": Row(
        "", OWN, "the optimizer's state of step {step}, the weights of step {base}: files of two checkpoints were mixed{scope}"
    ),
    "optimizer_settings_not_restored.own": Row(
        "",
        script("its own resume does not bring back the optimizer's settings, or what sets them", likely=True),
        "{name} is not what it was: param_groups were not loaded, or were overwritten afterwards; or the script, or the "
        "optimizer itself, goes on setting it by something that a restart began anew (a count of steps): save that with the "
        "checkpoint, and load it again{scope}",
    ),
    "buffers_not_restored.own": Row(
        "",
        script("its own resume does not bring back the model's buffers", likely=True),
        "not as they were: {name}; BatchNorm statistics and other buffers belong into the checkpoint, of each rank; the "
        "loss of training never shows them (hazard C7)",
    ),
    "buffers_not_restored.at_start": detail(
        hint="a restart begins with other buffers than the run had when it saved ({name:3}): not in the checkpoint, or not "
        "loaded (what strict=False passes over, what state_dict leaves out)"
    ),
    "lr_scheduler_of_another_step.own": Row(
        "",
        OWN,
        "the learning rate is that of step {step}, not of step {base}: its scheduler's state was not loaded, or was saved "
        "before the scheduler's own step, or a scheduler that is made after the optimizer was loaded sets its first rate "
        "anew{scope}",
    ),
    "lr_scheduler_of_another_step.by_hand": Row(
        "learning rate of another step",
        hint=f"the learning rate is that of step {{step}}, not of step {{base}}: {_BY_HAND}{{scope}}",
    ),
    "lr_scheduler_not_restored.own": Row("", OWN, "{where}: {scheduler}"),
    "lr_scheduler_not_restored.still": Row(
        "learning rate stands still",
        hint="the learning rate stays what it was when the restart began, where it goes on changing undisturbed: its scheduler "
        "sets that of another optimizer than the one that trains (one that came out of the checkpoint within a scheduler's "
        "state, param_groups that load_state_dict replaced below a wrapper, an optimizer that was made anew), is not "
        "stepped any more, or waits for what did not come back (a best loss, a patience); or the script sets it without a "
        "scheduler, by what a restart does not bring back (a count of steps or epochs){scope}",
    ),
    "lr_scheduler_not_restored.by_hand": Row("learning rate not restored", hint=f"{{seen}}: {_BY_HAND}{{scope}}"),
    **{
        f"lr_scheduler_not_restored.{because}": detail(hint=f"{seen}: {follows}")
        for because, (seen, follows) in OF_RATES.items()
    },
    "ended_at_another_step.own": Row(
        "",
        script("what ends it, or how it counts, is not the same after a restart"),
        "a restart counts steps, epochs or batches otherwise than the first start did: other arguments, another batch size, "
        "an epoch left out or done again, samples of a stream's buffer lost (a best loss, patience and clocks belong into the "
        "checkpoint, too)",
    ),
    "bucket_layout.own": Row(
        "",
        Blame(
            whose="library", reason="torch's DDP rebuilds its buckets in the first step of every process, outside chaosrun, too"
        ),
        "DDP rebuilt its buckets: its first step after a restart sums gradients in another order, {apart} apart, "
        "at three and more ranks outside chaosrun, too (find_unused_parameters=True never rebuilds; "
        "prime_buckets: true shows what else differs)",
    ),
}


def _own() -> Iterator[tuple[str, Row]]:
    """Rows of state that chaosrun would have restored."""
    for code, row in DIFFERENCE_ROWS.items():
        if "." not in code and row.blame is not None and row.blame.whose == "chaosrun":
            yield f"{code}.own", Row("", OWN)


RESUME_ROWS: Mapping[str, Row] = {**_RESUME, **dict(_own()), **STREAM_ROWS, **_STATES, **_BY_LIBRARY}
