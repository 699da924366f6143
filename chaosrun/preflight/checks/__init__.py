"""The checks, a module each with its `CHECK`: what it asks of the nodes, and how it judges the answers."""
