"""lazymodel for Flax: NNX modules and Linen modules, built abstractly.

`lazymodel.build_abstract` finds this package by itself once Flax is imported. `nnx` and `linen` are its two
interfaces; everything else is the core's.
"""

from lazymodel_flax._adapter import adapter

__all__ = ["adapter"]
