"""Faults: their kinds (`kinds.KINDS`), when one is due (`points`), how it strikes, and what shows that it happened (`landed`).

Nothing here decides whether a fault should happen or what follows from it.
"""
