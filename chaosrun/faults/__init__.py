"""What faults do inside a worker: when one is due (`points`), the claim on it (`records.markers`), one arm per kind.

`arms.ARMS` lists the arms. Nothing here decides whether a fault was right to happen or what follows from it.
"""
