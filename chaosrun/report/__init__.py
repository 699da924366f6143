"""Accounts of runs, drills and suites: for people, for CI systems, on a terminal while they go on. Decides nothing."""
