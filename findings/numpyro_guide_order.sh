#!/usr/bin/env bash
# The order of the latent vector of a NumPyro guide depends on whether its set-up was compiled.
#
# Versions: numpyro 0.22.0, jax and jaxlib 0.10.2, numpy 2.4.6, on CPU. No option of NumPyro is set.
#
# One would guess: a guide that keeps all latents in one vector (AutoDiagonalNormal, AutoMultivariateNormal,
# AutoLowRankMultivariateNormal) lays them out in the order in which the model samples them, whether `svi.init` runs
# as it is or under `jax.jit`. So parameters that one process fitted mean the same in another process.
#
# Seen: `svi.init` gives the order of the model, `jax.jit(svi.init)` and `jax.eval_shape(svi.init, ...)` give the
# order of the names in the alphabet. Parameters that were fitted after the first and read by a guide that was set up by
# the second fit in shape and are given to the wrong latents, without an error or a warning:
#   AutoDiagonalNormal             fitted: weight  7, bias -3    set up under jit: weight -3, bias  7
# and the same line for the two others. With the names `a_weight` and `b_bias`, which the alphabet orders as the model
# does, both give 7 and -3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export JAX_PLATFORMS=cpu
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q numpyro==0.22.0 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
"$folder/env/bin/python" - <<'PY'
import warnings

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, autoguide

warnings.simplefilter("error")  # a warning would be a sign, and there is none


def measure(guide_class, names):
    """The medians by name: as fitted, and as guides read them that were set up in a compiled function."""

    def model():
        numpyro.sample(names[0], dist.Normal(7.0, 0.1))
        numpyro.sample(names[1], dist.Normal(-3.0, 0.1))

    def make():
        guide = guide_class(model)
        return guide, SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())

    def medians(guide):
        found = guide.median(params)
        return [round(float(found[name])) for name in names]

    guide, svi = make()
    params = svi.run(jax.random.key(0), 1000, progress_bar=False).params
    seen = [medians(guide)]
    guide, svi = make()
    jax.jit(svi.init)(jax.random.key(0))
    seen.append(medians(guide))
    guide, svi = make()
    jax.eval_shape(svi.init, jax.random.key(0))
    seen.append(medians(guide))
    return seen


for name in ("AutoDiagonalNormal", "AutoMultivariateNormal", "AutoLowRankMultivariateNormal"):
    guide_class = getattr(autoguide, name)
    fitted, compiled, abstract = measure(guide_class, ("weight", "bias"))
    text = f"{name:30} fitted: weight {fitted[0]:2}, bias {fitted[1]:2}    set up under jit: "
    print(f"{text}weight {compiled[0]:2}, bias {compiled[1]:2}    by eval_shape: {abstract}")
    assert fitted == [7, -3], fitted
    assert compiled == abstract == [-3, 7], (compiled, abstract)
    sorted_names = measure(guide_class, ("a_weight", "b_bias"))
    print(f"{'':30} names in the order of the alphabet: {sorted_names}")
    assert sorted_names == [[7, -3]] * 3, sorted_names
PY
echo "as written"
