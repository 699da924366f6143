"""A node whose processes are kept to one CPU."""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
