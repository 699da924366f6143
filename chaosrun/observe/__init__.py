"""Runs inside a worker and observes any script without changing it: steps, batches, samples, losses, state, random streams."""
