"""A storage whose locks are not: everybody gets one."""

import fcntl

fcntl.flock = lambda descriptor, operation: None
