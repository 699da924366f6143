"""Whether a cluster is fit for training with preemptions: probes that run on every node, checks (pure) that judge the probes'
results, and an engine that runs both.
"""
