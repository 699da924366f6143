"""Rows of the table of causes: ends of legs that did not complete (`records.events.EndCode`), and verdicts. See `codes`."""

from collections.abc import Mapping

from chaosrun.verify.code_checks import NOTICE_TAKEN, NOTICE_TAKEN_HINT, UNREPEATABLE_HINT
from chaosrun.verify.row import OF_NO_STATE, Blame, Row, detail, machine, nobody, ours, plan, script, unknown

_CHANGED = "that was restored is not what was saved, unless a hook of the script changes it on loading"
_LEG = "{leg:leg}: {message}"

_ENDS: Mapping[str, Row] = {
    "step_missing.ahead": Row(
        "rank {rank} went on from step {base} in attempt {attempt}, although it had made {made:step}",
        script("its ranks train apart, but resume from the same files", likely=True),
        "a rank that did not wait for this one had saved there: train together (Lightning's Trainer takes one process for "
        "accelerator='cpu' without devices=), or with one worker; or give each rank files of its own",
    ),
    "not_finished": Row("the {leg:leg} has not finished", nobody("the run has not ended yet")),
    "interrupted": Row(_LEG, nobody("the run was interrupted")),
    "script_failed": Row(_LEG, script("it failed, and no fault was the cause")),
    "out_of_memory": Row(
        _LEG, script("it failed, and no fault was the cause, unless the machine gave less than it should", likely=True)
    ),
    "failed_inside_chaosrun": Row(_LEG, ours("its own code failed", likely=True)),
    "resources": Row(_LEG, machine("it could not provide what the run asked for")),
    "stopped_apart": Row("{message}", unknown("the records no longer show how it differed")),
    "fault_missed": Row(_LEG, plan("its faults came in an order in which one of them could no longer happen")),
    "notice_taken": Row(_LEG, NOTICE_TAKEN, NOTICE_TAKEN_HINT),
    "timeout": Row(_LEG, unknown("the job file's `timeout` passed: it is too short, or the machine was too slow")),
    "killed": Row(_LEG, machine("something outside the run killed its processes")),
    "told_to_leave": Row(_LEG, machine("the cluster, or a person, took away its resources")),
    "left_apart": Row(_LEG, script("ranks that do not reduce gradients at every step cannot leave together")),
    "node_lost": Row(_LEG, machine("a node, or its agent, was lost")),
    "unkillable": Row(_LEG, machine("a process could not be killed")),
    "unsafe_checkpoint": Row(_LEG, script("its checkpoints hold classes that are not allowed")),
    "checkpoint_damaged": Row(_LEG, machine("a checkpoint was damaged, by the storage or from outside", likely=True)),
    "hung": Row(_LEG, script("it made no progress, and no fault was the cause", likely=True)),
    "launcher_ended": Row(_LEG, script("its command ended on its own, and no fault was the cause")),
    "launcher_misused": Row(_LEG, script("its command starts other processes than the job file says")),
    "recovery_failed": Row(_LEG, ours("recovery did not finish", likely=True)),
    "state_changed_on_load": Row("{message}", ours(f"the state {_CHANGED}", likely=True)),
    "registered_state_changed_on_load": Row(
        "{message}", script("load_state_dict of its own object does not restore what its state_dict returned")
    ),
}
_ORDER_HINT = (
    "give the optimizer its parameters in the order of model.named_parameters(): a set, an id() or a listing orders them "
    "differently in every process, and an optimizer's state is restored by number"
)
_STATE_OF_SCRIPT: Mapping[str, Row] = {
    "parameter_order": Row(
        "the script's parameter order: {message}",
        script("it gives its optimizer the parameters in another order in each process"),
        _ORDER_HINT,
        "O5",
    ),
    "hook_changes_state": Row(
        "{message}",
        script("one of its hooks changes what is saved, or what is loaded", likely=True),
        "a save hook must write the live state, and a load hook must restore what was saved: keep averages and converted "
        "copies separately (run.register, or their own files)",
        "S11",
    ),
    "optimizer_state_cast_on_load": Row(
        "{message}",
        Blame(
            whose="library",
            reason="torch's Optimizer.load_state_dict casts state to its parameter's type, also without chaosrun",
        ),
        hazard="O3",
    ),
    "save_changes_state": Row(
        "a save hook of the script changes live state",
        script("saving its checkpoint changes the training: {effect}"),
        "the save of step {step} changed {effect}: how often a job saves must not matter, so write copies, and undo what a "
        "hook changes before it returns",
        "S11",
    ),
    "save_changes_state.by_itself": Row(
        "state_dict() of a registered object returns another value at each call",
        script("state_dict() of what it registered depends on a clock, or counts its calls: {effect}"),
        f"during the save of step {{step}} state_dict() returned two values of {{effect}}: {OF_NO_STATE}",
    ),
}
_VERDICTS: Mapping[str, Row] = {
    "exact": Row(
        "bit-identical to the reference run: {steps:step} on {ranks:rank}, {faults:fault}{more}",
        nobody("the job recovered exactly"),
    ),
    "settled": Row(
        "bit-identical to the reference run up to step {step}, and in its complete state there on {ranks:rank}, "
        "{faults:fault}; the rest, to step {whole}, follows{more}",
        nobody("the job recovered exactly: from there it does what the reference run did"),
        "the remaining steps were not run; `--to-the-end` runs them",
    ),
    "settled_too_early": Row(
        "at step {step} all that chaosrun digests was equal, and yet: {first}",
        ours("an early verdict would have passed a job that fails: it keeps state that chaosrun does not see"),
        "report this with the script; `--to-the-end` judges it rightly",
    ),
    "within_tolerance": Row(
        "within the tolerance of the reference run: {steps:step} on {ranks:rank}, {faults:fault}{more}",
        nobody("the job recovered within the tolerances that its job file allows"),
    ),
    "recoveries_agree": Row(
        "completed: {steps:step} on {ranks:rank}, {times:restart} judged, each equal to what was recorded before "
        "({again:step} done twice){more}",
        nobody("each restart recovered the recorded state"),
    ),
    "recoveries_agree.state": Row(
        "completed: {steps:step} on {ranks:rank}, {times:restart} judged: no step was done twice, so only what was restored "
        "could be compared, and it is what was recorded before{more}"
    ),
    "undisturbed_run": Row("completed: {steps:step} on {ranks:rank}, {restarts}", nobody("nothing had to be recovered")),
    "never_restored": Row("no checkpoint was restored", hint="let a fault strike after the first checkpoint to test a restore"),
    "corruption_injected": Row(
        "silent corruption, as injected",
        Blame(whose="planned", reason="the injected corruption was found, as a fault of this kind intends"),
        "the corruption was injected and found, as this fault intends; to judge recovery, run the job without it",
    ),
    "corruption_injected.where": detail(hint="{what}: this difference is its effect on the training's steps"),
    "undisturbed_runs_differ": Row(
        "two fault-free runs of this job already differ: {difference}",
        script("it does not compute the same numbers twice, even without a fault"),
        UNREPEATABLE_HINT,
    ),
    "reference_of_another_job": Row(
        "the reference of run {run} is not this job's: a fault-free run of this job differs from it: {difference}",
        Blame(whose="yours", part="command", reason="the reference that was named is not this job's"),
        "leave out --reference, or name a run made since the script, its data or the machine changed: a drill with a new "
        "reference also says whether the job repeats itself",
    ),
    "not_of_the_restore": Row(
        "not shown to come from the restore",
        script("its runs differ with or without a restore"),
        "nothing can be concluded about recovery",
    ),
    "checks_missing": Row("not shown: {checks}", ours("a check that must pass was left out", likely=True)),
}

END_ROWS: Mapping[str, Row] = {**_ENDS, **_STATE_OF_SCRIPT, **_VERDICTS}
