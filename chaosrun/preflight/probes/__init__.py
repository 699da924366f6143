"""Probes, one module each: `probe(parameters) → facts`, run in a process of its own on a node.

Effects; no ray, no judgement. Modules that are no probe themselves (what probes share) have no function `probe`.
"""
