"""Where ranks run: Ray places them, an agent on each node controls them, its fork server forks them. Only this imports ray."""
