"""Inside a worker: `chaosrun.attach`: determinism, position, resuming, checkpoints, windows, bucket priming. No ray."""
