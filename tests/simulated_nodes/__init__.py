"""Nodes that are only simulated, by the hundred, for drills of a thousand ranks on one machine.

The supervisor, its stores, its journal and everything above are the real ones, as are `ClusterWorkers` and the placement's
fan-out. What lies beyond is simulated, on a real clock: one process (`farm`) is all the nodes, each with a socket of its own,
the real `NodeAgent` behind it, and a fork server that says what the real one says, but forks nothing. Its ranks write the
files that real ones write, heartbeats, traces, checkpoints, markers and end records, and compute nothing.
"""
