"""Whether a cluster is fit to train on, with preemptions: probes that run on every node, checks (pure) that judge what the
probes found, and an engine that runs both.
"""
