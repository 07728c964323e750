"""lazymodel for Flax: NNX modules and Linen modules, built abstractly.

`lazymodel.build_abstract` finds this package by itself once Flax is imported; the core does everything else. `tunix`
and `maxtext` load Hugging Face checkpoints into models of Tunix and MaxText by their own tables.

    >>> import jax, numpy as np, lazymodel as lm
    >>> from flax import linen, nnx
    >>> from lazymodel_flax import maxtext, tunix
    >>> module = lm.build_abstract(nnx.Linear, 8, 16, rngs=nnx.Rngs(0)).materialize()
    >>> variables = lm.build_abstract(linen.Dense(16), jax.random.key(0), jax.numpy.ones((1, 8))).materialize()
"""

from lazymodel_flax import maxtext, tunix
from lazymodel_flax._adapter import adapter

__all__ = ["adapter", "maxtext", "tunix"]
