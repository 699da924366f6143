"""What the records tell of how samples are loaded: whether they depend on the global random streams, and whether loader workers
draw the same numbers. Pure."""

from collections.abc import Iterator

from chaosrun.records.history import Attempt
from chaosrun.records.traces import ProbeRecord
from chaosrun.verify.check import Drill

REMEDY = {
    "global_rng": "draw from chaosrun.sample_rng(index) in __getitem__, or wrap the dataset in chaosrun.reproducible",
    "never_repeats": "draw from chaosrun.sample_rng(index) instead of a generator that the dataset keeps or that the operating "
    "system or the clock seeds",
}


def sample_finding(drill: Drill) -> ProbeRecord | None:
    """What the probe found out about the training loader; the chaos leg's own, else the reference's."""
    for leg in (drill.chaos, drill.reference):
        for attempt in leg.attempts:
            for trace in attempt.traces.values():
                if trace.probe:
                    return trace.probe
    return None


def unrepeatable(finding: ProbeRecord | None) -> str | None:
    """What the probe saw and what to do, when it saw that samples cannot be had again after a restart."""
    if finding is None or finding.items not in REMEDY:
        return None
    return f"{finding.detail}: {REMEDY[finding.items]}"


def irreproducible_samples(drill: Drill) -> Iterator[str]:
    """Samples that a restart cannot repeat, even where this drill's restarts did not need to (hazards R4, R5, R6)."""
    seen = unrepeatable(sample_finding(drill))
    if seen:
        yield f"a restart within an epoch cannot repeat the samples: {seen}"


def repeated_streams(drill: Drill) -> Iterator[str]:
    """Loader workers that begin with the same random streams: between workers, between ranks, or from epoch to epoch, which is
    the same augmentation over and over (hazard R9). The first pair is named."""
    for leg in (drill.reference, drill.chaos):
        for attempt in leg.attempts:
            found = _first_repetition(attempt)
            if found:
                yield (
                    f"{found}: a worker_init_fn seeds them alike (leave it out, or seed from torch.initial_seed(), which "
                    "differs between workers, ranks and epochs)"
                )
                return


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
