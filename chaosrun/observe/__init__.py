"""Inside a worker: what is seen of any script, and never changed: batches, samples, fingerprints, random streams."""
