"""Where ranks run: Ray places them, an agent on each node reaches them, its fork server forks them. Only this imports ray."""
