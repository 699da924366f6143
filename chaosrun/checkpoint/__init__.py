"""Checkpoints as directories on disk: manifest, audit, store, retention. No torch, no ray, no knowledge of what the files
mean."""
