"""What will be done to the job, decided before anything starts: faults, and the seeded planner that places them. Pure."""
