"""Rows of the table of causes: other samples, or other inputs of the model, than in the reference run. See `codes`."""

from collections.abc import Mapping

from chaosrun.verify.row import Blame, Row, detail, ours, script


def _sampled(sentence: str) -> Blame:
    return ours(f"{sentence} on resume, unless the script's own sampler lost its place", likely=True)


_DERIVE = (
    "derive the order of a pass from set_epoch(epoch), or register its state (run.register: what it held when the pass began)"
)
_OWN_PLACE = f"it counts its own passes, and a restarted process counts from zero again; {_DERIVE}"
_HELD_APART = "{name} is {seen} when epoch {epoch} starts after the restart, expected is {expected}"
_ORDER_OF_SCRIPT = script("the order of its samples depends on a seed or state that no checkpoint holds", likely=True)
OF_EPOCH = "the samples are those of epoch {epoch} {where}, expected was epoch {expected}"

DATA: Mapping[str, Row] = {
    "sampler_epoch_not_set": Row(
        "sampler epoch not set",
        _sampled("sampler epoch not set"),
        f"{OF_EPOCH}: the sampler's epoch was not set (call set_epoch in every epoch)",
        "D1",
    ),
    "sampler_epoch_not_set.place": detail(hint=OF_EPOCH),
    "sampler_epoch_ahead": Row(
        "sampler epoch ahead", _sampled("sampler epoch ahead"), f"{OF_EPOCH}: epochs were counted twice{{by_all}}", "D19"
    ),
    "sampler_epoch_ahead.place": detail(hint=OF_EPOCH),
    "batches_skipped": Row(
        "{batches:batch} skipped",
        _sampled("{batches:batch} skipped"),
        "the samples seen are those expected at step {step}, batch {index} of epoch {epoch}: {batches:batch} skipped, the "
        "count of batches to skip on resume is off by {batches}, or what had been fetched ahead was lost "
        "(prefetched batches)",
        "D8",
    ),
    "batches_repeated": Row(
        "{batches:batch} repeated",
        _sampled("{batches:batch} repeated"),
        "the samples seen are those expected at step {step}, batch {index} of epoch {epoch}: {batches:batch} repeated, the "
        "count of batches to skip on resume is off by -{batches}, or, where a pass has as many batches, the source began an "
        "earlier pass again",
        "D8",
    ),
    "data_of_another_rank": Row(
        "data of another rank",
        _sampled("data of another rank"),
        "the batch seen is rank {other}'s of step {step}: the ranks' shares of the data changed (the order of the ranks, or a "
        "place in the data, or random streams, that one rank saved and all have loaded: each has its own)",
        "D7",
    ),
    "data_order_not_restored": Row(
        "data order not restored",
        _ORDER_OF_SCRIPT,
        "no recorded step saw this batch: the shuffle uses a seed or state that was not restored (use a seedable sampler with "
        "an explicit data_seed)",
        "D5",
    ),
    "batches_skipped.rest_of_epoch": detail(
        hint="the samples seen are those expected at step {step}, batch {index} of epoch {epoch}: the rest of the epoch "
        "before, {batches:batch}, was left out: the epoch was taken as finished (a save within it that counts as its end), or "
        "what a stream had read ahead (a shuffle buffer, prefetched batches) was lost{by_all}"
    ),
    "batches_skipped.within_window": detail(
        hint="the step took {window} micro-batches, but began with number {begins} of these {window}: the count of batches to "
        "skip on resume is off by {batches}, or what had been fetched ahead was lost, or it was saved within an accumulation "
        "window, and the place in the window began at 0 again (restore it with the gradients of each rank, or save only at a "
        "window's end)",
        hazard="G2",
    ),
    "batches_skipped.before_update": detail(
        hint="data and random streams are one step ahead of weights and optimizer: the checkpoint was saved before the "
        "optimizer's step, and counts it as done (save after the step, or count it later), or the restart takes a batch "
        "without a step (to initialise or build the model)"
    ),
    "batches_repeated.at_first": detail(
        hint="the samples seen are those expected at step {step}, batch {index} of epoch {epoch}: {batches:batch} repeated, as "
        "those already done were not skipped (skip them, or save and load the state of the loader)"
    ),
    "data_order_not_restored.broken": detail(
        hint="the batches start as at step {step}, but then differ from those that follow there: what keeps the order (a "
        "stream's shuffle buffer, a sampler's place, its epoch or its random stream, an environment) was not restored{scope}"
    ),
    "data_order_not_restored.place": detail(hint="no recorded step saw this batch"),
    "source_keeps_its_place": Row(
        "the script's sampler or stream counts its own passes: {name}",
        script("its sampler or stream keeps its own place, which no checkpoint holds"),
        f"{_HELD_APART}: {_OWN_PLACE}",
        "D15",
    ),
    "source_keeps_its_place.state": Row(
        "the script's sampler or stream keeps state of its own: {name}",
        script("its sampler or stream keeps state of its own, which no checkpoint holds"),
        f"{_HELD_APART}: the order of its samples depends on what earlier passes or steps left there, which a restarted "
        f"process does not have; {_DERIVE}",
    ),
    "source_keeps_its_place.unseen": Row(
        "",
        script("its sampler or stream keeps its own place, which no checkpoint holds", likely=True),
        f"{{name}} is never told its epoch (it has no set_epoch), {{where}}: {_OWN_PLACE}",
    ),
    "more_batches": Row("data order", _ORDER_OF_SCRIPT, "more batches were seen in this step than are recorded of it", "D14"),
    "batch_contents": Row(
        "batch contents",
        script("the same samples have other contents: they depend on something that is not restored"),
        "the same samples have other contents: augmentation or a loader worker draws from a random stream that is not "
        "restored (draw from chaosrun.sample_rng(index) in __getitem__), a cache holds samples augmented earlier, or the "
        "dataset lists its samples in another order (sort what comes from a set or a directory)",
        "R5",
    ),
    "batch_contents.own": detail(
        hint="the same samples have other contents: augmentation or a loader worker draws from a random stream that is not "
        "restored, a cache holds samples augmented earlier, what decides how much of a batch is used was lost (a running "
        "loss, a curriculum stage), the dataset lists its samples in another order (sort a set or a directory), persistent "
        "loader workers keep the epoch that the dataset had when they started (no set_epoch reaches them), or "
        "another input of the model was lost (a carried hidden state)"
    ),
    "batch_contents.of_step": detail(
        hint="the same samples have the contents of step {step}, in epoch {epoch}: the epoch, count or seed that their order "
        "or augmentation is made from was not restored, or a cache holds them"
    ),
    "batch_contents.changed": detail(
        hint="the loader handed out the same samples, but other inputs were made of them: what the dataset or the script "
        "normalises, mixes or augments with (loader workers begin new random streams at each start: draw by epoch and index), "
        "or keeps between loader and model (running statistics, its own generator or counter, a buffer of earlier samples), "
        "was not restored: save it with the checkpoint, and restore it",
        hazard="O8",
    ),
    "batch_contents.beside_tensors": Row(
        "an input of the model besides its tensors was not restored",
        script(
            "it passes its model a number, text or list that it computes from something that a restart does not restore",
            likely=True,
        ),
        "the tensors that go into the model are as expected, but another input (a number, text or list) is not: save what it "
        "is computed from (a temperature, the last loss) with the checkpoint, and restore it",
        "O8",
    ),
    "batch_contents.unrepeatable": detail(hint="the same samples have other contents: {probe}"),
    "batch_contents.held": detail(
        hint="the same samples have other contents: {name} of the script's dataset is {seen} when epoch {epoch} starts after "
        "the restart, expected is {expected}, and no checkpoint holds it (draw from chaosrun.sample_rng(index), or pass "
        "an object that holds it to run.register)"
    ),
    "batch_contents.independent": detail(
        hint="the same samples have other contents: they do not depend on the global random streams (the probe looked), so the "
        "dataset depends on something that a restart loses: a cache of samples augmented earlier, its own generator or "
        "counter, the order of a set or a directory (sort it); or only some samples draw (draw from "
        "chaosrun.sample_rng(index))"
    ),
    "batch_size_not_restored": Row(
        "batch size not restored",
        script("its batch size depends on something that no checkpoint holds"),
        "a batch has {samples:sample} where it had {expected} in the reference run: the batch size depends on a count, a "
        "schedule or an argument that was not restored (save it with the checkpoint, and build the loader from it)",
        "D14",
    ),
    "accumulation_window": Row(
        "accumulation window",
        script("a step took another number of micro-batches than before", likely=True),
        "the step took {seen} instead of {expected} micro-batches: the place within the window was not restored (save only at "
        "the end of a window), or each rank's gradients accumulated before the save were not, or the window's length changed",
        "G2",
    ),
    "accumulation_window.within": detail(
        hint="the step took the last {seen} of its {expected} micro-batches: the restart went on within the window, as it was "
        "saved there, without the gradients that each rank had accumulated before, or with those of one rank on all (save and "
        "load the gradients of each rank, or save only at the end of a window)"
    ),
    "data_resume_inexact": Row(
        "data.resume is {protocol}",
        Blame(
            whose="yours",
            part="job file",
            reason="it asks for a data.resume that does not resume exactly; only seedable is exact",
        ),
        "set data.resume: seedable (data.resume is {protocol}, and only seedable is exact)",
    ),
}
