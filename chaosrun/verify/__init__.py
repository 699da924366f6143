"""Was the job that was killed the job that was not? Records, checks, first divergence, verdict; no ray."""
