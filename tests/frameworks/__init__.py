"""Training scripts as users of each framework write them, none adapted to chaosrun, and the drills that judge them."""
