"""What `chaosrun init` writes: a job that passes at once, to be changed into one's own."""
