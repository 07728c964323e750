"""Tools for research on models: initial values, widths and depths, larger models from smaller ones, differences.

All of them are also names of `lazymodel`: `lm.research.mup` is `lm.mup`.
"""

from lazymodel.extras.research import grow, initializers
from lazymodel.extras.research.coordinate_check import CoordinateCheck, coordinate_check
from lazymodel.extras.research.diff import diff
from lazymodel.extras.research.mup import Mup, mup
from lazymodel.extras.research.statistics import statistics
from lazymodel.extras.run.signals import signals

__all__ = ["CoordinateCheck", "Mup", "coordinate_check", "diff", "grow", "initializers", "mup", "signals", "statistics"]
