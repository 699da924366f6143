"""Many drills for one question: every point (`sweep`), the smallest failing plan (`shrink`), a suite with expected verdicts."""
