"""A node whose part of the connections starts late the first time, as from a slow disk. LATE_ONCE is a file."""

import os
import sys
import time

if sys.orig_argv[-1:] == ["chaosrun.preflight.probes.mesh"] and not os.path.exists(os.environ["LATE_ONCE"]):
    open(os.environ["LATE_ONCE"], "w").close()
    time.sleep(5.5)
