"""What people and CI are shown of sweeps, shrinks and suites."""
