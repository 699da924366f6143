"""Reports on runs, drills and suites: for people, for CI systems, and live on a terminal. Decides nothing."""
