"""Is this cluster fit to train on, and to be preempted on?

Probes (effects) on every node, assessments (pure) of what they found, and an engine that brings the two together.
"""
