"""Inside a worker: what is seen of any script, and never changed: steps, batches, samples, losses, state, random streams."""
