"""Commands that `chaosrun.cli` puts together, the arguments that all of them share, and how they speak to a terminal."""
