"""Rows of the table of causes: how a leg ended that did not complete (`records.events.EndCode`), and verdicts. See `codes`."""

from collections.abc import Mapping

from chaosrun.verify.blame import OF_NO_STATE, Blame, Row, detail, machine, nobody, ours, plan, script, unknown
from chaosrun.verify.code_checks import NOTICE_TAKEN, NOTICE_TAKEN_HINT, UNREPEATABLE_HINT

_CHANGED = "that came back is not what was saved, unless a hook of the script changes it on loading"
_LEG = "{leg} leg: {message}"

_ENDS: Mapping[str, Row] = {
    "not_finished": Row("the {leg} leg has not finished", nobody("the run has not come to its end")),
    "interrupted": Row(_LEG, nobody("the run was interrupted")),
    "script_failed": Row(_LEG, script("it failed, and no fault was the reason")),
    "out_of_memory": Row(
        _LEG, script("it failed, and no fault was the reason, unless the machine gave less than it should", likely=True)
    ),
    "failed_inside_chaosrun": Row(_LEG, ours("code of its own failed", likely=True)),
    "resources": Row(_LEG, machine("it could not give what the run asked for")),
    "stopped_apart": Row("{message}", unknown("the records no longer show how it differed")),
    "fault_missed": Row(_LEG, plan("its faults met in an order in which one of them could not happen any more")),
    "notice_taken": Row(_LEG, NOTICE_TAKEN, NOTICE_TAKEN_HINT),
    "timeout": Row(_LEG, unknown("the job file's `timeout` passed: it is too short, or the machine was too slow")),
    "killed": Row(_LEG, machine("something outside the run killed its processes")),
    "told_to_leave": Row(_LEG, machine("the cluster, or a person, took away its resources")),
    "left_apart": Row(_LEG, script("ranks that do not reduce gradients at every step cannot leave together")),
    "node_lost": Row(_LEG, machine("a node, or its agent, was lost")),
    "unkillable": Row(_LEG, machine("a process could not be killed")),
    "unsafe_checkpoint": Row(_LEG, script("its checkpoints hold classes that are not allowed")),
    "checkpoint_damaged": Row(_LEG, machine("a checkpoint was damaged, by the storage or from outside", likely=True)),
    "hung": Row(_LEG, script("it made no progress, and no fault was the reason", likely=True)),
    "launcher_ended": Row(_LEG, script("its command ended by itself, and no fault was the reason")),
    "launcher_misused": Row(_LEG, script("its command starts processes otherwise than the job says")),
    "recovery_failed": Row(_LEG, ours("recovery came to no end", likely=True)),
    "state_changed_on_load": Row("{message}", ours(f"the state {_CHANGED}", likely=True)),
    "registered_state_changed_on_load": Row(
        "{message}", script("load_state_dict of an object of its own does not bring back what its state_dict gave")
    ),
}
_ORDER_HINT = (
    "give the optimizer its parameters in the order of model.named_parameters(): a set, an id() or a listing orders them anew "
    "in every process, and an optimizer's state is restored by number"
)
_STATE_OF_SCRIPT: Mapping[str, Row] = {
    "parameter_order": Row(
        "the script's parameter order: {message}",
        script("it gives its optimizer the parameters in another order in another process"),
        _ORDER_HINT,
        "O5",
    ),
    "hook_changes_state": Row(
        "{message}",
        script("a hook of its own changes what is saved, or what is loaded", likely=True),
        "what a hook on saving writes has to be the live state, and what a hook on loading puts back has to be what was saved: "
        "keep averages and converted copies beside it (run.register, or files of their own)",
        "S11",
    ),
    "optimizer_state_cast_on_load": Row(
        "{message}",
        Blame(
            whose="library",
            reason="torch's Optimizer.load_state_dict casts state to its parameter's type, outside chaosrun, too",
        ),
        hazard="O3",
    ),
    "save_changes_state": Row(
        "a save hook of the script changes live state",
        script("a save of its checkpoint changes the training: {effect}"),
        "the save of step {step} changed {effect}: how often a job saves must not matter, so write copies, and put "
        "back what a hook changes before it returns",
        "S11",
    ),
    "save_changes_state.by_itself": Row(
        "state_dict() of a registered object gives another value each time",
        script("state_dict() of what it registered follows a clock, or counts its calls: {effect}"),
        f"within the save of step {{step}} state_dict() gave two values of {{effect}}: {OF_NO_STATE}",
    ),
}
_VERDICTS: Mapping[str, Row] = {
    "exact": Row(
        "bit-identical to the undisturbed run: {steps:step} on {ranks:rank}, {faults:fault}{more}",
        nobody("the job came back exactly"),
    ),
    "settled": Row(
        "bit-identical to the undisturbed run up to step {step}, and in its complete state there on {ranks:rank}, "
        "{faults:fault}; the rest, to step {whole}, follows{more}",
        nobody("the job came back exactly: from there it does what the undisturbed run did"),
        "the rest of the steps was not run; `--to-the-end` runs them",
    ),
    "settled_too_early": Row(
        "at step {step} all that chaosrun digests was equal, and yet: {first}",
        ours("an early verdict would have passed a job that fails: it keeps state that chaosrun does not see"),
        "report this with the script; `--to-the-end` judges it rightly",
    ),
    "within_tolerance": Row(
        "within the tolerance of the undisturbed run: {steps:step} on {ranks:rank}, {faults:fault}{more}",
        nobody("the job came back within the tolerances that its job file allows"),
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
        Blame(whose="planned", reason="the injected corruption was found, as a fault of this kind is meant to be"),
        "the corruption was injected and found, as this fault means it to be; to judge recovery, run the job without it",
    ),
    "corruption_injected.where": detail(hint="{what}: this difference is its effect on the training's steps"),
    "undisturbed_runs_differ": Row(
        "two undisturbed runs of this job already differ: {difference}",
        script("it does not give the same numbers twice, without any fault"),
        UNREPEATABLE_HINT,
    ),
    "reference_of_another_job": Row(
        "the reference of run {run} is not this job's, whose undisturbed run differs from it: {difference}",
        Blame(whose="yours", part="command", reason="the reference that was named is not this job's"),
        UNREPEATABLE_HINT,
    ),
    "not_of_the_restore": Row(
        "not shown to come from the restore",
        script("it differs from itself, with or without a restore"),
        "from here nothing can be said about recovery",
    ),
    "checks_missing": Row("not shown: {checks}", ours("a check that must pass was left out", likely=True)),
}

END_ROWS: Mapping[str, Row] = {**_ENDS, **_STATE_OF_SCRIPT, **_VERDICTS}
