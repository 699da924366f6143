"""Running drills where others run things: files for GitHub Actions, for Ray on Kubernetes and for Slurm, and Ray's own jobs.

Owns what those systems want to read. Must not know how a drill is run: what it writes calls the `chaosrun` command.
"""
