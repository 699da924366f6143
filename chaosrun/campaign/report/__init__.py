"""Reports of sweeps, shrinks and suites, for people and CI."""
