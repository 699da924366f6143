"""Many drills together: one at every point (`sweep`), the search for the smallest failing plan (`shrink`), suites with expected
verdicts."""
