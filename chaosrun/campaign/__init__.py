"""Many drills of one job for one question: what happens at every point (`sweep`), which fault it takes (`shrink`).

Their drills follow each other on placements that are kept. What a drill is, and what its verdict rests on, others decide.
"""
