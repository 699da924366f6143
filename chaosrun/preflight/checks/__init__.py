"""The checks, one module each with its `CHECK`: its probes, and how it judges their answers. Modules without one are parts of
`network`."""
