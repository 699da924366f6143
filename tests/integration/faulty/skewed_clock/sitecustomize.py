"""A node whose clock is a minute ahead."""

import time

true = time.time
time.time = lambda: true() + 60
