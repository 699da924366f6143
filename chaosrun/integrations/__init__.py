"""What connects chaosrun to other programs: pytest, exports for CI and clusters, new projects, JSON Schemas."""
