"""The records that chaosrun writes while it runs, and their readers: run layout, journal, trace, worker order.

Pure data and files: no ray, no torch. Everything persisted carries a schema version `v`.
"""
