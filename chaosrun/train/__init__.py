"""What runs inside a worker process: determinism, resume protocol, checkpoints, fault points, trace. Never imports ray."""
