"""Rows of the table of causes: the findings of checks that did not pass. See `codes`.

A row without blame is for a failure that the first divergence explains, or whose cause the records do not show.
"""

from collections.abc import Mapping

from chaosrun.verify.row import OF_NO_STATE, Row, detail, machine, ours, plan, script, unknown

NOTICE_TAKEN = script("its own SIGTERM handler replaces the one by which chaosrun saves and leaves")
NOTICE_TAKEN_HINT = (
    "leave SIGTERM to chaosrun, which saves a checkpoint at the end of the step and then ends all ranks; or plan kills"
)
_ENDED_AT = "the {leg:leg} ended at step {step} on rank {rank}, expected was step {expected}"
UNREPEATABLE_HINT = (
    "first make the script compute the same numbers twice without any fault: seeds, deterministic: strict, threads"
)


def irreproducible(kind: str) -> str:
    """The row with the advice for runs without faults in which this quantity is the first to differ."""
    return f"wanders.{kind.replace(' ', '_')}"


WANDERS: Mapping[str, Row] = {
    irreproducible(kind): detail(hint=hint)
    for kind, hint in {
        "rng": "chaosrun seeds python, numpy and torch before the script begins: the script reseeds one from the clock or the "
        "system (torch.seed(), random.seed() without a number), or draws from it more or less often; give each seed a "
        "number, and each loader its own generator",
        "data order": "its samples come in another order each time: give loader and sampler a seeded generator, and sort what "
        "os.listdir, glob and sets yield",
        "batch": "its samples hold other numbers each time, or a stream yields others: seed the numbers of augmentation, "
        "noise, and a stream's own shuffle, and look for data that change in between",
        "weights": "it starts with other weights each time: call torch.manual_seed before building the model, load one file, "
        "and fill all uninitialised memory (to_empty of a model on the meta device, torch.empty)",
        "loss": "the same weights and samples give another loss: seed the separate generators of dropout and noise; "
        "deterministic: strict refuses operations that are not; look for what depends on the clock, a file or the order "
        "of a set (a set of objects is ordered by their addresses)",
        "gradient": "the same loss gives other gradients: an operation whose backward pass is not deterministic, which "
        "deterministic: strict refuses, or another number of threads",
        "learning rate": "its learning rates come from something other than the step: the clock, a measurement, a file",
        "optimizer": "the same gradients give other weights: look at the optimizer, and at what else changes weights",
    }.items()
}
_DRIFT_HINT = (
    "where DDP does not average gradients, each rank trains its own model: {averaged}, and change weights alike on all ranks"
)
_UNSEEN_HINT = (
    "it may have been rounded away, or hit a value without effect: choose another tensor or a higher bit, or save checkpoints "
    "more often"
)
_LATE_HINT = "the training ended at step {end}, before {late}: plan them earlier (with max_steps, `plan` checks that)"
_UNRELIABLE = ours("the reference run cannot be relied on", likely=True)
_OTHER_PLACE = ours("the job did not resume where it should have", likely=True)
_AFTER_THE_END = script("all steps agree but the state at the end does not: it was changed after the last step", likely=True)
_NOT_FROM_THE_BEGINNING = ours("the first attempt did not begin at the beginning", likely=True)
_NO_END = ours("the end of a rank was not recorded", likely=True)
_NOT_PRIMED = ours("the gradient buckets could not be primed", likely=True)
_UNSEEN = plan("the injected corruption shows in nothing that is compared", likely=True)

_ANY: Mapping[str, Row] = {
    "check_crashed": Row("check crashed: {error}: {message}", ours("the check {check} crashed")),
    "check_undecided": Row("could not be checked: {message}"),
    "records_lacking": Row("only {compared} of {of} records could be compared", ours("records are missing", likely=True)),
    "recovery_differs": Row("attempt {attempt} was not restored to what it had been: {what} ({where})"),
    "recovery_unjudged": Row(
        "attempt {attempt} cannot be compared with what was recorded before: {why}",
        unknown("no step was done twice, and no saved state was recorded"),
    ),
    "records_differ": Row("{what} differ in {differing} of {compared} records, first at {where}"),
    "settled_unproven": Row(
        "the leg ended at step {step} of {whole}, which does not prove the rest to be equal: {problem}",
        ours("a leg was ended too early", likely=True),
        "`--to-the-end` runs the rest",
    ),
    "ended_at_a_difference": Row(
        "the leg was ended at step {step} of {whole}, after the second checkpoint in a row that is not the reference's"
    ),
    "end_not_recorded": Row("the {leg:leg} has no end record of {who}", _NO_END),
    "no_attempt": Row("the chaos leg started no attempt", _NOT_FROM_THE_BEGINNING),
    "state_outside": Row(
        "the training changes state that no checkpoint holds: {what:6}; a restart loses it, but a drill notices only if the "
        "training reads it",
        script("it keeps state that no checkpoint holds"),
        "call run.register(name, object) before the loop to save and restore what its state_dict() holds; prepare() an "
        "optimizer that steps",
    ),
    "reference_empty": Row("no step was recorded to compare with", _UNRELIABLE),
}
_PREMISES: Mapping[str, Row] = {
    "records_damaged": Row(
        "the records are damaged: {first}{more}",
        machine("the run's files are damaged, by the storage or from outside", likely=True),
        "they cannot be judged: put the run's files back as they were, or submit the job again",
    ),
    "leg_unfinished": Row("the {leg:leg} has not finished"),
    "stopped_at_alarm": Row("the run was stopped at the alarm, as `recovery.on_divergence: stop` asks"),
    "leg_not_completed": Row("the {leg:leg} ended with {outcome}: {message}"),
    "inexact_restore": Row("the restored state is not the saved one: {message}"),
    "reference_ends_differ": Row(
        "the ranks of the reference leg ended at steps {steps:9}, not at one",
        script("its ranks make different numbers of steps"),
        "ranks are compared step by step: give each as many batches as the others (a DistributedSampler pads its shares; "
        "uneven ones under torch's Join are not followed)",
    ),
    "ended_at_another_step": Row(
        _ENDED_AT,
        script("it ended at another step than expected: its end condition is not in the job's state", likely=True),
        "the end of training depends on something that no checkpoint holds: the best loss, the patience of early stopping, "
        "the script's own counter or clock ({kept})",
        "O8",
    ),
    "ended_on_notice": Row(_ENDED_AT, NOTICE_TAKEN, NOTICE_TAKEN_HINT),
    "fault_in_reference": Row("a fault struck the reference leg: {faults}", _UNRELIABLE),
    "reference_interrupted": Row(
        "the reference leg was interrupted and started again, so it cannot serve as a reference",
        machine("the reference run was interrupted, too", likely=True),
    ),
    "reference_interrupted.died": Row(
        "the reference leg was interrupted and started again, so it cannot serve as a reference: {reason}"
    ),
    "reference_raised": Row(
        "the reference leg failed and was started again, so it cannot serve as a reference: {reason}",
        script("it failed, and no fault was the cause"),
        "the traceback is in the reference leg's log of attempt {attempt}: mend what raises it, and submit the job again",
    ),
    "reference_unreliable": Row("the reference leg cannot be relied on: {problem}", _UNRELIABLE),
    "environment_not_recorded": Row(
        "the environment of the {which} leg was not recorded", ours("the environment was not recorded", likely=True)
    ),
    "environment_differs": Row(
        "the legs ran in different environments: {first}",
        machine("the two legs did not run in the same environment"),
        "start every attempt in the same environment; a script may also set it (torch.set_num_threads, OMP_NUM_THREADS)",
    ),
    "bits_differ": Row(
        "{where} computes other bits than {first} from the same numbers: its processor or GPU, instruction set or thread "
        "count differs",
        machine("the two legs did not run in the same environment"),
    ),
    "source_changed": Row(
        "{file} was changed while the drill ran{more}: the {leg} leg, or a part of it, ran another version than the "
        "reference began with",
        script("its sources were changed while the drill ran"),
        "submit the job again, and leave its sources alone until the drill has ended; what the job writes itself belongs into "
        "os.environ['CHAOSRUN_OUTPUT']",
    ),
    "file_of_another_leg": Row(
        "the {leg} leg read {file}, which was written during the {left_by}{more}: its numbers may come from there",
        script("it leaves files behind that its next run reads", likely=True),
        "if the job wrote it: write training results to os.environ['CHAOSRUN_OUTPUT'], a folder that each leg's attempts "
        "share, and remove the file; write data caches before the first batch. If it was changed from outside: submit the job "
        "again, and leave its data alone until the drill has ended",
    ),
    "first_attempt_restored": Row(
        "the first attempt of the chaos leg resumed from a checkpoint that is not shown to be the reference's: {why}",
        _NOT_FROM_THE_BEGINNING,
    ),
    "job_not_repeatable": Row(
        "the job does not repeat itself: {how}",
        script("it does not compute the same numbers twice, even without a fault"),
        UNREPEATABLE_HINT,
    ),
    "job_not_repeatable.by_itself": Row(
        "",
        script("state_dict() of what it registered depends on a clock, or counts its calls"),
        f"state_dict() of a registered object returns another value of {{name}} at each call: {OF_NO_STATE}",
    ),
    "job_not_repeatable.restored_twice": Row(
        "", script("it does not compute the same numbers twice from the same checkpoint", likely=True)
    ),
}
_FAULTS: Mapping[str, Row] = {
    "plan_altered": Row("{how}", machine("the run's plan was changed after it had begun, by the storage or from outside")),
    "no_fault_planned": Row(
        "no fault was planned: nothing about recovery was tested",
        plan("it has no fault"),
        "plan at least one: faults.schedule or faults.random in the job file",
    ),
    "faults_too_late": Row(
        "none of the {planned} planned faults came before the training ended: nothing about recovery was tested",
        plan("its faults come after the training's end"),
    ),
    "faults_too_late.by_steps": detail(hint=_LATE_HINT),
    "fault_not_shown": Row(
        "{failing} of {planned} {which} cannot be shown to have happened: {fault}: {problem}",
        ours("{fault} cannot be shown to have happened", likely=True),
    ),
    "fault_not_shown.never_due": Row("", plan("the training ended before {fault} was due"), _LATE_HINT),
    "fault_not_shown.never_due_by_time": Row("", plan("the training ended before {fault} was due", likely=True)),
    "fault_not_shown.never_reached": Row("", plan("the training did not reach the point that {fault} waits for", likely=True)),
    "fault_not_shown.unread": Row("", plan("nothing that came after {fault} used what it had changed")),
    "fault_not_shown.no_such_file": Row(
        "",
        plan("this save writes no file with the name that {fault} strikes"),
        "name one with `file`: a pattern matches the whole path below the outputs, such as '*optimizer.pt'; `chaosrun sweep "
        "--saves` lists them",
    ),
    "fault_not_shown.nothing_to_strike": Row(
        "",
        plan("the save that {fault} is to strike makes no operation that it could strike"),
        "strike a save that does (a script that never syncs gives nothing to wait for: kind: power_cut shows what that "
        "costs); `chaosrun sweep --saves` lists what each save does",
    ),
    "fault_not_shown.fewer_operations": Row(
        "",
        plan("the save that {fault} is to strike has fewer operations"),
        "name a lower `operation`; `chaosrun sweep --saves` tries each that a save has",
    ),
    "fault_not_shown.no_loader_worker": Row(
        "",
        plan("no loader worker was alive at the point of {fault}"),
        "a loader has workers only while it is read, with num_workers above 0; choose a step in the middle of its pass",
    ),
    "fault_not_shown.trained_on": Row(
        "",
        plan("the training was over before the script left on the notice of {fault}"),
        "give the notice earlier, or set a `grace` shorter than the rest of the training, after which the rank is killed, as "
        "on a cluster; a script that ignores SIGTERM never leaves before that",
    ),
    "fault_not_shown.notice_taken": Row("", NOTICE_TAKEN, NOTICE_TAKEN_HINT),
    "fault_not_shown.failed_on_notice": Row(
        "",
        script("it crashed after the notice of {fault}, instead of leaving", likely=True),
        "what it does on SIGTERM crashes, or its ranks act on the notice at different steps and wait for each other in vain, "
        "as in a save that one of them makes alone: the tracebacks are in the logs of attempt {attempt}",
    ),
    "fault_not_shown.used": Row("", ours("the job resumed from a checkpoint that {fault} had damaged")),
    "fault_not_shown.other_death": Row(
        "", machine("{death}, in the attempt of {fault}, before that could be seen to land; run it again")
    ),
    "corruption_absent": Row("no corruption took place", _UNSEEN, _UNSEEN_HINT),
    "corruption_unseen": Row("{what}, and nothing that is compared shows it", _UNSEEN, _UNSEEN_HINT),
    "corruption_elsewhere": Row(
        "the first difference, in {where}, does not come from what was injected: {what}", _UNSEEN, _UNSEEN_HINT
    ),
    "corruption_seen": Row("{what}; first seen in {where}{more}"),
}
_RECOVERY: Mapping[str, Row] = {
    "ranks_without_steps": Row("no step was recorded by ranks {absent}"),
    "strange_ranks": Row("ranks {strangers} have traces but no place in the job"),
    "step_done_twice": Row("rank {rank} recorded step {step} again in attempt {attempt}", _OTHER_PLACE),
    "step_missing": Row("rank {rank} lacks step {step}", _OTHER_PLACE),
    "step_beyond_the_end": Row("rank {rank} continued to step {step}, the reference ended at {final}", _OTHER_PLACE),
    "checkpoint_not_taken_back": Row(
        "checkpoint {checkpoint} is intact but cannot be restored: {reason}",
        script("what it prepares before the restore differs from what it had when it saved", likely=True),
        "the restore happens at the first batch: parameter groups, layers and objects that the loop adds later must exist "
        "before it in every attempt (frozen, or at a learning rate of 0)",
    ),
    "checkpoint_not_taken_back.raised": detail(
        hint="the script's own code raised it ({at}), which the restore calls: a load_state_dict, set_extra_state or load hook "
        "must take what was saved with it"
    ),
    "wrong_resume_point": Row("attempt {attempt}: {problem}", _OTHER_PLACE),
    "saved_state_differs": Row("attempt {attempt} {did} another {component} state at step {step} on rank {rank}: {which}"),
    "replay_differs": Row(
        "{field} of {place} is not what attempt {before} had computed",
        script("steps done twice gave different results: something in them is not deterministic", likely=True),
    ),
    "bucket_layout_differs": Row(
        "attempt {attempt} reduced step {step} of rank {rank} in another bucket layout{why}",
        ours("gradients were reduced in another layout after a restart", likely=True),
    ),
    "bucket_layout_unrecorded": Row("{leg}: no layout was recorded for step {step} of rank {rank}", _NOT_PRIMED),
    "bucket_layout_unseen": Row("no bucket layout could be compared", _NOT_PRIMED),
    "buckets_not_primed": Row(
        "the gradient buckets were not primed (attempt {attempt}): the first step may have used another layout", _NOT_PRIMED
    ),
}
_STEPS: Mapping[str, Row] = {
    "batches_all_alike": Row(
        "every batch has the same bytes: a wrong order could not be seen",
        script("all its batches are the same: no wrong order could be seen"),
    ),
    "loss_nan": Row(
        "the loss is NaN from step {nan_since} to the end: NaN would hide a difference",
        script("its losses are NaN, with or without a fault", likely=True),
    ),
    **{
        f"{code}.left_out": detail(
            hint="everything was restored as saved, but the step {made}: its batch was skipped, or optimizer.step() was not "
            "called, and what decides that (a running mean of losses or norms, a count) is in no checkpoint ({kept})",
            hazard="O8",
        )
        for code in ("forward_pass", "gradient")
    },
    "state.outside": detail(hint="state that no checkpoint holds: the training changes {outside:6} ({named})", hazard="O8"),
    "files.ahead": detail(
        hint="after the restart the script read {ahead:3}, which it had written to after step {base}: the contents may be "
        "ahead of the checkpoint (keep them in the checkpoint, or cut them back to the checkpoint's step)"
    ),
    "modules.set": detail(
        hint="settings are not as in the reference run at this step: {set:6}; no state dict holds that: set it "
        "at each start, from the step or the epoch (not only in the step that changes it), or save it with the checkpoint, "
        "and restore it",
        hazard="O8",
    ),
    "values.apart": detail(
        hint="when it resumed at step {at}, the script had {had:6}{of_rank}, which the restart did not restore ({named})"
    ),
    "values.as_saved": detail(
        hint="when it resumed at step {at}, the script had {as_saved:6}{of_rank}, just as its checkpoint holds it: saved at "
        "another point of the step than the weights: before it was updated, or after it went on (save both at one point, or "
        "correct it when it is loaded)"
    ),
    "learning_rate.still": detail(
        hint="the learning rate stays what it was when the restart began, but keeps changing in the reference run: the script "
        "sets it in a dict that it took from optimizer.param_groups before the restore, which replaced these dicts (read "
        "optimizer.param_groups in each step), or by a scheduler that is no longer stepped, or from something that no "
        "checkpoint holds ({counted})"
    ),
    "steps_all_skipped": Row(
        "no learning rate was recorded: every step was skipped",
        script("every step was skipped by its gradient scaler", likely=True),
    ),
    "gradients_constant": Row(
        "every step's gradients have the same fingerprint: they were not seen",
        script("its gradients look alike at every step", likely=True),
        "the loss does not depend on the weights, or its gradients are all zero (a cross entropy of one class, a loss of "
        "detached or clipped values): no step can show what a restart lost",
    ),
    "parameters_constant": Row(
        "the parameters never changed: nothing was trained",
        script("its parameters never change", likely=True),
        "the learning rate or the gradients are zero, or the optimizer holds other tensors than the model's",
    ),
    "parameters_unnamed": Row("the reference names no tensors on rank {rank}", _UNRELIABLE),
    "parameters_renamed": Row(
        "attempt {attempt} has other parameters, or another order, from number {index} on (rank {rank})",
        script("it builds other parameters, or in another order, in another attempt"),
        "build the same model in every attempt, whatever the order of sets, files or settings",
    ),
    "weights_differ_at_start": Row("attempt {attempt} resumed from step {step} with other weights on rank {rank}"),
    "replicas_drift": Row(
        "replicas drifted apart: {leg}: {what}{aside}", script("its replicas drift apart", likely=True), _DRIFT_HINT
    ),
    "replicas_drift.begun": Row(
        "",
        script("its ranks start with different weights, even without a fault"),
        "each rank built them with its own seed, and nothing made them equal: DDP broadcasts rank 0's weights only of the "
        "module that it wraps, not of an average or a teacher copied from it before (make it after DDP, or broadcast it)",
    ),
    "drift.rates": detail(
        hint="the ranks' learning rates differ in that step ({unlike_rates}): each rank's scheduler counts, or is given, "
        "something of its own (a metric for ReduceLROnPlateau: reduce it over all ranks before)"
    ),
    "replicas_drift.fault_free": Row("", script("its replicas drift apart even without a fault")),
    "replicas_not_compared": Row("no two ranks recorded the same step"),
}
_FINALS: Mapping[str, Row] = {
    "final_state_not_digested": Row("the end records digest no {what}"),
    "final_record_missing": Row("rank {rank} has no end record in both legs", _NO_END),
    "final_digests_missing": Row("the end record of rank {rank} has no {group} digests", _NO_END),
    "final_ranks_differ": Row("ranks {ranks} digest no {what}, the others do"),
    "final_state_differs": Row("{group}: {differing:1} differ on rank {rank}", _AFTER_THE_END),
    "final_reference_differs": Row("the reference ended rank {rank} at step {step}, its last step is {last}", _UNRELIABLE),
    "final_position_differs": Row("rank {rank} ended at {seen}, the reference at {expected}", _OTHER_PLACE),
    "final_checkpoint_differs": Row("{how}", _OTHER_PLACE),
    "final_checkpoint_invalid": Row("{leg}: {problem}", _OTHER_PLACE),
    "final_checkpoint_invalid.since": Row(
        "{leg}: {problem}, but was intact when the run ended",
        machine("files of the run were removed or changed after its end"),
        "the verdict of its end is in verdict.json; to judge the run again, put its files back as they were, or submit the job "
        "again",
    ),
    "final_checkpoint_not_common": Row("{leg}: the ranks name no common final checkpoint ({found})"),
    "final_checkpoint_not_digested": Row("a final checkpoint's manifest digests nothing"),
    "final_weights_missing": Row("no final weights to compare: {problem}"),
    "final_weights_renamed": Row("the tensors' names differ: {tensor}", _AFTER_THE_END),
    "final_weights_differ": Row("{tensor}: {how}", _AFTER_THE_END),
}

CHECK_ROWS: Mapping[str, Row] = {**WANDERS, **_ANY, **_PREMISES, **_FAULTS, **_RECOVERY, **_STEPS, **_FINALS}
