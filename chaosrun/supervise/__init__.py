"""Carries out a drill: starts and watches attempts, strikes faults, restarts, cancels; every step is written to a journal."""
