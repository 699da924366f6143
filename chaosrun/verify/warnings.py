"""Warnings: findings in a drill's records that change no verdict. Each sentence names the finding and what to do. Add one as a
function `(Drill) -> Iterator[str]` to WARNINGS. Pure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice, pairwise

from chaosrun.faults.fault import BY_DEFAULT
from chaosrun.records.history import Attempt
from chaosrun.records.left import MOST_BYTES
from chaosrun.records.traces import ProbeRecord
from chaosrun.verify.alignment import attempt_start, newer_elsewhere
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import same_batches
from chaosrun.verify.left import fewer_bytes, left_over, other_figures
from chaosrun.verify.own_saves import saved_by_several
from chaosrun.verify.plain_values import values_never_restored
from chaosrun.verify.rates import schedule_behind
from chaosrun.verify.recovery import set_aside_unplanned
from chaosrun.verify.replicas import is_sharded, never_equal_again, of_reference
from chaosrun.wording import count, listed, rank_list

ENOUGH = 8000
TELLING = 8
"""With at least this many samples, the same order in two epochs is no coincidence."""
REMEDY = {
    "global_rng": "draw from chaosrun.sample_rng(index) in __getitem__, or wrap the dataset in chaosrun.reproducible",
    "never_repeats": "draw from chaosrun.sample_rng(index) instead of a generator that the dataset keeps or that is seeded "
    "from the operating system or the clock",
}


def overlapping_shares(drill: Drill) -> Iterator[str]:
    """Ranks that shuffle differently see some samples twice an epoch and others never (hazard D7). Examines the first epoch.

    Ranks that all use the same ids do not count: each numbers its own share (a slice), or reads all samples.
    """
    by_rank: list[list[str]] = []
    numbers: list[set[str]] = []
    epoch = 0
    for rank in sorted(drill.reference_lineage.steps):
        if len(by_rank) > 1 and sum(map(len, by_rank)) >= ENOUGH:
            break
        epoch, ids, last = next(_ids_by_epoch(drill, rank), (0, None, None))
        if ids is None or len(set(ids)) < len(ids):
            return  # a sampler that repeats samples by itself
        if ids in by_rank and is_sharded(drill.reference):
            continue  # ranks of one tensor-parallel group, which compute the same batches together
        by_rank.append(ids)
        numbers.append({*ids, *(last or ())})
    everything = [sample for ids in by_rank for sample in ids]
    repeated = len(everything) - len(set(everything))
    if repeated and not all(each <= max(numbers, key=len) for each in numbers):
        remedy = (
            "give all ranks' samplers one seed, or use DistributedSampler"
            if drill.by_script
            else "give DataLoaderConfiguration an explicit data_seed; seed by rank only after prepare"
        )
        yield (
            f"in epoch {epoch}, ranks saw {repeated} samples that other ranks saw too, and no rank saw some others: they "
            f"shuffle differently ({remedy})"
        )


def repeated_order(drill: Drill) -> Iterator[str]:
    """Two epochs that share a shuffled order: the shuffle ignores the epoch. Examines the first two, of two ranks."""
    ranks = sorted(drill.reference_lineage.steps)[:2]
    epochs = [list(islice(_ids_by_epoch(drill, rank), 2)) for rank in ranks]
    if not epochs or any(len(each) < 2 or each[0][1] is None or each[0][1] != each[1][1] for each in epochs):
        return
    orders = [first or [] for (_, first, _), _ in epochs]
    if sum(map(len, orders)) >= TELLING and any(map(_is_shuffled, orders)):
        (before, _, _), (after, _, _) = epochs[0]
        yield (
            f"epochs {before} and {after} had their samples in the same shuffled order: set_epoch is not called, or does not "
            "reach the sampler (leave the shuffling to DataLoader(shuffle=True), or give the sampler a set_epoch method)"
        )


def saves_that_change_state(drill: Drill) -> Iterator[str]:
    """A save that changes live state: a job that saves more or less often trains differently."""
    traces = (*drill.reference.traces, *drill.chaos.traces)
    changed = (record for trace in traces for record in trace.checkpoints if record.changed and not record.by_itself)
    saved = next(changed, None)
    if saved:
        yield (
            f"the save of step {saved.step} changed {saved.effect}: how often the job saves now affects the training (write "
            "copies, and undo what a hook changes)"
        )


def masked_loads(loads: Sequence[str]) -> str:
    """For a script that calls `chaosrun.attach` and also loads checkpoints itself: attach restores after that
    (`records.run_file`)."""
    return (
        f"the script also loads its own checkpoints ({listed(loads, most=3)}), but chaosrun.attach restores over them: its "
        "own save and load were not tested (to test them, drill a copy without attach)"
    )


def _is_shuffled(ids: list[str]) -> bool:
    """Many ids are smaller than the one before them. In an unshuffled share only one or two are, where it wraps around to fill
    the last batches."""
    numbers = [int(sample) if sample.lstrip("-").isdecimal() else 0 for sample in ids]
    return sum(left > right for left, right in pairwise(numbers)) > len(numbers) / 5


def _ids_by_epoch(drill: Drill, rank: int) -> Iterator[tuple[int, list[str] | None, list[str] | None]]:
    """Epochs of the reference leg with their sample ids, those of the last batch, which may be padded, separately; None if not
    all are known."""
    for epoch, records in groupby(drill.reference_lineage.of(rank).values(), key=lambda record: record.epoch):
        batches = [ids for record in records for ids in record.ids or (None,)]
        known = [ids for ids in batches if ids is not None]
        if len(known) < len(batches):
            yield epoch, None, None
        else:
            before, last = ([repr(sample) for ids in some for sample in ids] for some in (known[:-1], known[-1:]))
            yield epoch, before, last


def state_outside(drill: Drill) -> Iterator[str]:
    """State that the training changes and no checkpoint holds: a restart loses it, and a drill notices only if the training
    reads it."""
    if drill.outside:
        found = Cause.of("state_outside", what=drill.outside)
        yield f"{found.code}: {found.sentence} ({found.hint})"


def sample_finding(drill: Drill) -> ProbeRecord | None:
    """The probe's finding about the training loader; the chaos leg's own, else the reference's."""
    return next((trace.probe for trace in (*drill.chaos.traces, *drill.reference.traces) if trace.probe), None)


def unrepeatable(finding: ProbeRecord | None) -> str | None:
    """The probe's finding and what to do, if a restart cannot reproduce samples."""
    if finding is None or finding.items not in REMEDY:
        return None
    return f"{finding.detail}: {REMEDY[finding.items]}"


def irreproducible_samples(drill: Drill) -> Iterator[str]:
    """Samples that a restart cannot reproduce, even if this drill's restarts did not need to (hazards R4, R5, R6)."""
    if seen := unrepeatable(sample_finding(drill)):
        yield f"a restart within an epoch cannot repeat the samples: {seen}"


def repeated_streams(drill: Drill) -> Iterator[str]:
    """Loader workers that begin with the same random streams, and so draw the same augmentation (hazard R9). The first pair is
    named."""
    attempts = (*drill.reference.attempts, *drill.chaos.attempts)
    if found := next(filter(None, map(_first_repetition, attempts)), None):
        yield (
            f"{found}: a worker_init_fn gives them the same seed (remove it, or seed from torch.initial_seed(), which differs "
            "between workers, ranks and epochs)"
        )


def _first_repetition(attempt: Attempt) -> str | None:
    seen: dict[tuple[str, str], tuple[int, int, int]] = {}
    for (epoch, rank, worker), streams in sorted(_workers(attempt).items()):
        first = next((seen[stream] for stream in streams.items() if stream in seen), None)
        if first is None:
            seen.update(dict.fromkeys(streams.items(), (epoch, rank, worker)))
            continue
        equal = " and ".join(name for name, digest in streams.items() if seen.get((name, digest)) == first)
        if first[0] != epoch:
            return f"loader worker {worker} of rank {rank} draws the same {equal} numbers in epochs {first[0]} and {epoch}"
        if first[1] != rank:
            return f"loader workers of ranks {first[1]} and {rank} draw the same {equal} numbers"
        return f"loader workers {first[2]} and {worker} of rank {rank} draw the same {equal} numbers"
    return None


def _workers(attempt: Attempt) -> dict[tuple[int, int, int], dict[str, str]]:
    """Streams by (epoch, rank, worker)."""
    return {
        (record.epoch, rank, worker): dict(streams)
        for rank, trace in attempt.traces.items()
        for record in trace.loader_workers
        for worker, streams in enumerate(record.workers)
        if streams is not None
    }


def primed_buckets(drill: Drill) -> Iterator[str]:
    """A script that resumes by itself, but whose DDP buckets chaosrun primed in every attempt. In the order of the parameters
    they are as DDP makes them, and leaves them with find_unused_parameters."""
    records = [each for trace in drill.chaos.traces if trace.attempt > 1 for each in trace.buckets if each.primed]
    primed = any([*bucket] != sorted(bucket) for each in records for bucket in each.layout or ())
    if drill.by_script and drill.spec.workers > 2 and primed:
        yield (
            "DDP's gradient buckets were primed in every attempt: without chaosrun the first step after a restart sums "
            "gradients in another order, which at three and more ranks is not bit-identical (prime_buckets: false shows it)"
        )


def saves_not_struck(drill: Drill) -> Iterator[str]:
    """The default plan has no kill inside a save if strace is not available."""
    faults = drill.plan.faults
    saved = any(save.step for trace in drill.reference.traces for save in trace.saves)
    if saved and faults and all(fault.source == BY_DEFAULT and fault.phase != "save" for fault in faults):
        yield (
            "no kill struck inside a save: the default plan includes one only if strace can trace the script (install it, and "
            "submit again)"
        )


def nothing_saved_since(drill: Drill) -> Iterator[str]:
    """For a script that resumes by itself: a count or an EMA that it lost shows only in a later save."""
    before, since = drill.chaos.attempts[:1], drill.chaos.attempts[1:]
    held = [[save.held for each in some for trace in each.traces.values() for save in trace.saves] for some in (before, since)]
    if drill.by_script and since and not any(each.steps for each in since):
        yield "no step was trained after a restart: nothing that a step needs was tested (kill it earlier)"
    elif drill.by_script and since and [*map(any, held)] == [True, False]:
        yield (
            "no checkpoint was saved after a restart: what the checkpoints hold beside weights and optimizer (counts, "
            "averages, best values) could not be compared (kill it earlier)"
        )


def newer_files(drill: Drill) -> Iterator[str]:
    """For a script that resumes by itself and saves to files of several names."""
    for base, newer in islice(filter(None, (newer_elsewhere(drill, attempt) for attempt in drill.chaos.attempts[1:])), 1):
        yield (
            f"a restart resumed from step {base.step} ({base.path}), but {newer.path}, saved after step {newer.step}, holds "
            "as much: if that is a checkpoint, too, the script does not find its newest one"
        )


def streams_not_restored(drill: Drill) -> Iterator[str]:
    """Random streams that a script does not restore, if nothing has drawn from them in the steps that followed."""
    for attempt in [] if drill.streams_count else [each for each in drill.chaos.attempts if each.steps]:
        found = attempt_start(drill, attempt)
        if found and "rng" in found.wrong:
            yield (
                f"the random streams were not restored (attempt {attempt.number} began with {found.words}), but nothing that "
                "was trained depends on them: dropout, augmentation or a shuffle that draws from them would differ after a "
                "restart (save and restore the random state of every rank, after the first batch of a loader that has no "
                "generator of its own: as it starts, it draws its seed)"
            )
            return


def optimizers_left_behind(drill: Drill) -> Iterator[str]:
    """Optimizers whose state a script has lost, if none of them makes any more steps."""
    for (number, _), names in sorted(drill.retired.items())[:1]:
        yield (
            f"the state of {listed(names)} was not restored (attempt {number}), but no step depended on it: the reference run "
            f"makes none with {'it' if len(names) == 1 else 'them'} after step {drill.chaos.attempt(number).resume_step} (if "
            "it is to step again, save and load its state, too; if not, delete it when its phase is over)"
        )


def damaged_by_nobody(drill: Drill) -> Iterator[str]:
    """For a run in production: checkpoints that were found damaged. It resumed from an older one, which cost steps."""
    aside = [] if drill.reference.attempts else set_aside_unplanned(drill)
    if aside:
        were = "was" if len(aside) == 1 else "were"
        yield f"{count(len(aside), 'checkpoint')} could not be restored and {were} set aside: {aside[0].reason}"


def seeded_by_chaosrun(drill: Drill) -> Iterator[str]:
    """A script that neither seeds nor restores torch's random stream: its attempts draw the same numbers only by chaosrun's
    seed."""
    starts = [start for attempt in drill.chaos.attempts[1:] for start in attempt.starts.values()] if drill.by_script else []
    unseeded = sorted({start.rank for start in starts if not start.seeded})
    if unseeded:
        where = "" if unseeded == sorted({start.rank for start in starts}) else f"on {rank_list(unseeded)} "
        yield (
            f"{where}the script neither seeds torch nor restores its random state: chaosrun gave every attempt the same seed "
            f"({drill.spec.seed}). Without chaosrun a restart draws other numbers, so a random split of the data, say, would "
            "differ (seed it, or save what was drawn)"
        )


def hash_seeds_differ(drill: Drill) -> Iterator[str]:
    """Each restart had a different PYTHONHASHSEED, because the script depends on hashes (`spec.hash_order`)."""
    if drill.hash_seeds:
        first, last = drill.hash_seeds
        yield (
            f"the script may depend on hash(), or on the order of a set{drill.hash_order}. A new process hashes strings "
            f"differently: each restart had another PYTHONHASHSEED, the last {last} (reference: {first}): sort the set, or "
            "set PYTHONHASHSEED in the job's `env`, and wherever the script runs without chaosrun"
        )


def ranks_differ(drill: Drill) -> Iterator[str]:
    """Weights that ranks do not share, as with experts or Local SGD, or by mistake."""
    replicas = of_reference(drill)
    own, usual = replicas.own, replicas.longest_unsynchronized
    if own:
        yield (
            f"{count(len(own), 'tensor')} (the first is {min(own)}) {'differs' if len(own) == 1 else 'differ'} between ranks "
            "from the beginning, and their gradients are not averaged (a mistake if the ranks are replicas: wrap the model in "
            "DistributedDataParallel)"
        )
    if usual > 1:
        yield (
            f"the ranks' weights differ for up to {usual} steps until the script synchronises them (right for Local SGD; a "
            "mistake for replicas under DistributedDataParallel)"
        )
    if parted := never_equal_again(drill):
        yield (
            f"the ranks' weights part at step {parted.step} and are never equal again (right for gossip, or a model of each "
            "rank's own; a mistake for replicas)"
        )


def files_not_compared(drill: Drill) -> Iterator[str]:
    """Files of tensors that the script left at its end, and that were too large to be read."""
    paths = drill.chaos.left.left_out
    if paths:
        yield (
            f"{count(len(paths), 'file')} of tensors (the first is {paths[0]}) were not compared at the end: only "
            f"{MOST_BYTES >> 20} MiB of each leg are read, the newest files first"
        )


def files_left_over(drill: Drill) -> Iterator[str]:
    """For files that a script normally removes when newer ones exist."""
    paths = left_over(drill)
    if paths:
        yield (
            f"files are still there that every fault-free run has removed: {listed(paths, most=3)}; the list of files to keep "
            "was perhaps not restored (save it in the checkpoint, or list the folder)"
        )


def collected_again(drill: Drill) -> Iterator[str]:
    """For losses or samples that a script collects while it trains, and writes repeatedly."""
    for name, expected, seen in fewer_bytes(drill):
        yield (
            f"{name} holds {seen} bytes after the restarts, but {expected} after every fault-free run: what was collected "
            "before a restart is lost (save it in the checkpoint, or append to what the file holds)"
        )


def figures_started_over(drill: Drill) -> Iterator[str]:
    """For figures in text files and in checkpoints: a mean of a metric, a count, a best value. The first is named."""
    found = list(other_figures(drill))
    if found:
        (name, expected, seen), *others = found
        more = f" ({count(len(others), 'other number')} too)" if others else ""
        yield (
            f"{name} is {seen} after the restarts (reference: {expected}){more}: what it is computed from (a mean, a count, a "
            "best value) perhaps started over at a restart (save it in the checkpoint, and restore it)"
        )


def inputs_without_effect(drill: Drill) -> Iterator[str]:
    """For inputs of a model other than its tensors. The first step is named."""
    for attempt in drill.chaos.attempts:
        for expected, seen in drill.pairs_apart(attempt):
            if seen.batch != expected.batch and same_batches(expected, seen):
                yield (
                    f"from step {seen.step} of attempt {attempt.number} on, an input of the model besides its tensors (a "
                    "list, a number, a text) differs from the reference run: no loss, gradient or weight depended on it"
                )
                return


WARNINGS: tuple[Callable[[Drill], Iterator[str]], ...] = (
    overlapping_shares,
    repeated_order,
    irreproducible_samples,
    repeated_streams,
    saves_that_change_state,
    state_outside,
    primed_buckets,
    saves_not_struck,
    nothing_saved_since,
    saved_by_several,
    newer_files,
    streams_not_restored,
    optimizers_left_behind,
    schedule_behind,
    values_never_restored,
    damaged_by_nobody,
    ranks_differ,
    files_not_compared,
    files_left_over,
    collected_again,
    figures_started_over,
    seeded_by_chaosrun,
    hash_seeds_differ,
    inputs_without_effect,
)


OF_RESULTS = (
    *(nothing_saved_since, newer_files, files_left_over, collected_again, figures_started_over, schedule_behind),
    values_never_restored,
)
"""Warnings that may follow from the difference that fails a drill."""


def warnings(drill: Drill, *, failed: bool = False) -> tuple[str, ...]:
    told = (warning for warning in WARNINGS if not (failed and warning in OF_RESULTS))
    return tuple(sentence for warning in told for sentence in warning(drill))
