"""Looking after an installation and what it keeps: what machine this is, and which of the old runs can go."""
