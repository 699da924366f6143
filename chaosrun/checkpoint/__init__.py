"""Checkpoints as directories on disk, or in an object store: audit, store, retention. No torch, no ray, no knowledge of what
the files mean."""
