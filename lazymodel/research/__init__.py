"""Tools for research on models: initial values, widths and depths, larger models from smaller ones, differences.

All of them are also names of `lazymodel`: `lm.research.mup` is `lm.mup`.
"""

from lazymodel.research import grow, initializers
from lazymodel.research._coordinate_check import CoordinateCheck, coordinate_check
from lazymodel.research._diff import diff
from lazymodel.research._mup import Mup, mup
from lazymodel.research._signals import signals
from lazymodel.research._statistics import statistics

__all__ = ["CoordinateCheck", "Mup", "coordinate_check", "diff", "grow", "initializers", "mup", "signals", "statistics"]
