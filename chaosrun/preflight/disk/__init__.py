"""What the storage probes do on a node's storage, in a folder of their own. No judging."""
