"""When this package began to be imported, for timelines; the first that its `__init__` imports."""

import time

BEGAN = time.perf_counter()
