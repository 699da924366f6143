"""Judge whether the chaos leg equals the reference leg: read records, run checks, find the first divergence, give the verdict.
Imports no ray."""
