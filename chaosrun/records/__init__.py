"""What chaosrun records while it runs, and how that is read again: run layout, journal, trace, worker order.

Pure data and files: no ray, no torch. Everything persisted carries a schema version `v`.
"""
