"""A storage whose fsync returns at once, with nothing done."""

import os

os.fsync = lambda descriptor: None
