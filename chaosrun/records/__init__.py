"""What chaosrun writes down while it runs, and how it is read again: run layout, journal, trace, worker order.

Pure data and files: no ray, no torch. Everything persisted carries a schema version `v`.
"""
