"""Rows of the table of causes: random streams that a script which resumes by itself did not restore, and what it restored of
another rank. See `codes`."""

from collections.abc import Mapping

from chaosrun.verify.row import Row, detail, script

OF_OWN_RESUME = script("its own resume, or the library that it uses for it, did not restore it", likely=True)

STREAM_ROWS: Mapping[str, Row] = {
    "data_order_not_restored.as_drawn": detail(
        hint="the batches start as at step {step}, and the random streams match that step, too: what draws, mixes or augments "
        "them started over with the streams (save and restore the random state of every rank, NumPy's and Python's too)",
        hazard="R1",
    ),
    "rng_not_restored.of_the_beginning": detail(hint="the {streams} are as before step 1: seeded again, not restored{scope}"),
    "streams.seeded_again": detail(
        hint="torch's stream was restored, and then seeded again at {seeded_again}, perhaps within the library called there: "
        "restore it after that"
    ),
    "rng_not_restored.with_data": detail(
        hint="the {streams} and the batches are those of the beginning: the streams were seeded again, not restored (save and "
        "restore the random state of every rank, NumPy's and Python's too); if the batches are not drawn from them, those "
        "already done were not skipped"
    ),
    "rng_not_restored.of_none": detail(
        hint="the {streams} match no step: not all were saved (NumPy's and Python's, too), or something drew from them after "
        "the restore: batches read in order to skip them, samples generated or split again, a loader that starts (it draws its "
        "seed from the global stream: restore after its first batch, or give it its own generator); or what decides how much "
        "is drawn was not restored (a buffer of samples){scope}",
        hazard="R1",
    ),
    "rng_not_restored.on_some_ranks": detail(
        hint="the {streams} were restored on {right}, not on {others}: each rank draws from its own, so each must save and "
        "load its own (saving on rank 0 only, also with accelerate's save_state, restores only rank 0's){scope}",
        hazard="R1",
    ),
    "rng_of_another_rank.own": detail(
        hint="rank {rank} began with the random streams of rank {other}: that rank's file was loaded, or only that rank saved "
        "its own (each rank has its own: save and load every rank's; torch.distributed.checkpoint keeps one copy of a name "
        "that is not sharded: put the rank in the name){scope}"
    ),
    **dict.fromkeys(
        [f"{part}_of_another_rank.own" for part in ("weights", "optimizer_state", "lr_scheduler")],
        Row(
            "",
            OF_OWN_RESUME,
            "rank {rank} restored what rank {other} holds: that rank's file was loaded, or only that rank saved its own (where "
            "each rank has its own, save and load every rank's){scope}",
        ),
    ),
    "rng_of_another_step.own": detail(
        hint="the random streams are at the position of step {step}, not of step {base}: saved at another time (between a "
        "step's forward pass and its update), or something drew that many numbers after the restore (an evaluation){scope}"
    ),
}
