"""Whether the disturbed leg came out like the undisturbed one: reads records, runs checks, finds the first divergence and gives
the verdict. Imports no ray."""
