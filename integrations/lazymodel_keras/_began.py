"""The time at which the import of this package began, for timelines; `__init__` imports this module first."""

import time

BEGAN = time.perf_counter()
