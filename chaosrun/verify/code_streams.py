"""Rows of the table of causes: random streams that a script which resumes by itself did not bring back. See `codes`."""

from collections.abc import Mapping

from chaosrun.verify.blame import Row, detail, script

OWN = script("its own resume, or the library that it leaves that to, did not bring it back", likely=True)

STREAM_ROWS: Mapping[str, Row] = {
    "rng_not_restored.of_the_beginning": detail(
        hint="the {streams} stand where they stood before step 1: seeded anew, and not restored{scope}"
    ),
    "rng_not_restored.of_none": detail(
        hint="the {streams} stand where they stood at no step: they were not saved, or something drew after they were "
        "restored: batches that are run through to be skipped, samples that are generated anew, a loader that is started "
        "(it draws its seed from the global stream: restore after its first batch, or give it a generator of its own){scope}",
        hazard="R1",
    ),
    "rng_not_restored.on_some_ranks": detail(
        hint="the {streams} came back on {right}, not on {others}: each rank draws from its own, so each has to save its own "
        "and load it again (what rank 0 alone saves, by accelerate's save_state too, brings back rank 0's alone){scope}",
        hazard="R1",
    ),
    "rng_of_another_rank.own": Row(
        "",
        OWN,
        "rank {rank} began with the random streams of rank {other}: that rank's file was loaded, or that rank alone saved its "
        "own (each rank has its own: save and load those of each){scope}",
    ),
    "rng_of_another_step.own": Row(
        "",
        OWN,
        "the random streams stand where they stood at step {step}, not at step {base}: saved at another time, or something "
        "drew as much after they were restored (an evaluation){scope}",
    ),
}
