"""Probes, one module each: `probe(parameters) → facts`, run in a separate process on a node.

Effects; no ray, no judgement. Shared modules that are not probes have no function `probe`.
"""
