"""The table of what works with models of other packages, written into `integrations/JAX_MODELS.md`.

python -m tests.others.support_table            # minutes; writes the rows of what is installed into the page
python -m tests.others.support_table NAME ...   # prints the rows of these models
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from flax import nnx

import lazymodel as lm

from .kinds import Call, OtherModel, installed_models

PAGE = Path(__file__).parent.parent.parent / "integrations" / "JAX_MODELS.md"
MODELS = installed_models()
LARGE = 1 << 20  # bytes of a variable that is not to be replicated where it can be split

_INTRODUCTION = """# Models of other packages

This page lists which models of other JAX packages work with lazymodel. [Flax](../docs/flax.md) and
[Getting started](../docs/start.md) describe how to build and shard one, and [Weight mapping](../docs/weight_maps.md)
how to load weights into it.

- **build**: `lm.build_abstract` takes the package's own class, module or init function; the number is that of the
  variables of a tiny model of the same layers.
- **values**: the values materialized on eight devices with `lm.auto()` equal those of the package's own code bit for
  bit.
- **shard**: for the model as published, or as named, `lm.auto()` replicates no variable of 1 MiB or more that eight
  devices could split.
- **plan**: that model's parameters, and their bytes on each of eight devices.
- **load**: how to load a Hugging Face checkpoint to the same values as with the package's own loader: with a table of
  `lazymodel_flax.tunix` or `lazymodel_flax.maxtext`, with what `WeightMap.suggest` proposes, or [with the package's own
  function](#loading); – if the package has no such loader, or one that needs PyTorch.

If a package itself fails, the row has its error; a test fails when the error is gone. Penzai's parameters are bound to
their model, and are not pytrees: `pz.unbind_params(model, freeze=True)` inside the init function makes a pytree.
"""
_COLUMNS = ("build", "values", "shard", "plan", "load")
_FOOTER = """## Loading

Levanter's conversion of a state dict only moves elements, so [under `jax.jit`](../docs/weight_maps.md#other-sources) it
takes lazy tensors:

```python
template = eqx.filter_eval_shape(LlamaLMHeadModel.init, Vocab, config, key=key)
convert = jax.jit(lambda tensors: from_torch_compatible_state_dict(template, tensors))
abstract = lm.build_abstract(LlamaLMHeadModel.init, Vocab, config, key=key).shard(mesh, rules)
model = abstract.materialize(lm.map_checkpoint(lm.open_checkpoint("hf://org/name"), convert))
```

Reparameterizations that scale weights (muP) compute values, and are an error. EasyDeL's converter needs PyTorch, and
its default mode, `torch_load_mode="full"`, loads through float16; the tables that `WeightMap.suggest` proposes have the
values of `"streaming"`. [`others_loading.py`](../tests/benchmarks/others_loading.py) loads folders of about 0.3 GiB in
bfloat16 onto 8 devices, and compares all values (peaks of private memory, as multiples of the model):

| | their loader | lazymodel |
|---|---|---|
| Levanter, Llama (`load_pretrained`) | 3.3 s; 8.1 × | **0.6 s; 1.1 ×** |
| Levanter, Mixtral with 8 experts | 1.9 s; 6.0 × | **0.5 s; 1.1 ×** |
| EasyDeL, Llama (`from_pretrained`, streaming) | 3.6 s; 1.6 × | **1.6 s; 1.3 ×** |
| EasyDeL, Qwen 3 with 8 experts | 16.6 s; 4.6 × | **2.7 s; 1.3 ×** |

## MaxText's tables

`maxtext.weight_map` with MaxText 0.2.5, for tiny models of each family of its `PARAM_MAPPING`, in float32 and bfloat16:
loaded and saved values equal those of its hooks on whole arrays bit for bit.

| family | layers | load | save |
|---|---|---|---|
| Llama 3.1, Gemma 2, Gemma 3, Qwen 2.5, Qwen 3 (dense, experts) | scanned, unscanned | ✓ | ✓ |
| Qwen 3 Next, Qwen 3.5, OLMo 3, Mixtral, GPT-OSS, DeepSeek 2 | scanned, unscanned | ✓ | ✓ |
| Gemma 4 31B, 26B-A4B | scanned in whole blocks of 6, unscanned | ✓ | ✓ |
| DeepSeek 3, DeepSeek 4 | scanned (a bias, experts: not along the axis of MaxText's loader), unscanned | ✓ | ✓ |
| Gemma 4 E4B, Qwen 3 VL, Weaver | unscanned only, as in MaxText | ✓ | ✓ |
| Qwen 3 Omni | unscanned only | ✓ | MaxText has no hooks for it |

In scanned models of Gemma 4 with other numbers of layers, MaxText's tables name the last layers as no model of it does.

## Inits that compute

Inits of flowjax, jaxley, distrax, numpyro, brax, jax-md and Haiku's ResNet18, which run a forward pass or need values
while they build, are built, equal their packages' own code bit for bit and resume: `test_inits_that_compute.py`.

## Environments

Use a separate environment for each, as no two agree on the versions of their dependencies: `maxtext` and
`gemma` with Python 3.12, the others with Python 3.11.

```bash
uv pip install -e . -r tests/others/requirements.txt && uv pip install --no-deps recurrentgemma==1.0.1
uv pip install -e . -r tests/others/requirements_maxtext.txt
uv pip install -e . -r tests/others/requirements_easydel.txt --override tests/others/requirements_easydel.txt
uv pip install -e . -r tests/others/requirements_levanter.txt
uv pip install -e . -r tests/others/requirements_computing.txt
```

Then, in each:

```bash
python -m tests.others.support_table              # writes the rows of the packages that are installed
python -m pytest -W default -m large tests/others # asserts them
```
"""


def row(model: OtherModel) -> str:
    """The line of one model; ✗ where something does not hold."""
    package = f"{model.package} {importlib.metadata.version(model.package)}"
    cells = [model.name, package, *(_failing(model) if model.error else _cells(model))]
    return f"| {' | '.join(cells)} |"


def _failing(model: OtherModel) -> list[str]:
    try:
        model.make(False).eager()
    except Exception as error:  # whatever it raises belongs into the table
        return [f"{model.package}: {type(error).__name__}: {error}", "", "", "", ""]
    return ["✗ it can be built now", "", "", "", ""]


def _cells(model: OtherModel) -> list[str]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("model",))
    tiny = _abstract(model.make(False))
    made, expected = leaves(tiny.shard(mesh, lm.auto()).materialize()), leaves(model.make(False).eager())
    equal = len(made) == len(expected) and all(map(_equal, made, expected))
    abstract = _abstract(model.make(True)).shard(mesh, lm.auto())
    whole = [v.path for v in abstract.values() if v.nbytes >= LARGE and _splittable(v) and v.shard_nbytes == v.nbytes]
    abstract.plan()
    count = sum(variable.size for variable in abstract.values())
    each = sum(variable.shard_nbytes for variable in abstract.values())
    return [
        f"✓ {len(tiny):,}",
        "✓" if equal else "✗",
        f"✗ {whole[0]}" if whole else "✓",
        f"{count / 1e9:.2f} billion, {each / 2**30:.2f} GiB",
        model.load,
    ]


def _abstract(call: Call) -> lm.AbstractModel:
    return lm.build_abstract(call.build, *call.args, **call.kwargs)


def leaves(built: Any) -> list[jax.Array]:
    """All arrays of a model, keys as their data."""
    found = jax.tree.leaves(nnx.state(built) if isinstance(built, nnx.Module) else built)
    arrays = [leaf for leaf in found if hasattr(leaf, "dtype")]
    return [jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in arrays]


def _equal(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and np.array_equal(np.asarray(one), np.asarray(other))


def _splittable(variable: lm.AbstractVariable) -> bool:
    return any(extent and extent % 8 == 0 for extent in variable.shape)


def page(rows: list[str]) -> str:
    """The whole page with these rows in the places of those of the same models, or after all others."""
    header = f"| model | package | {' | '.join(_COLUMNS)} |\n|---|---|{'---|' * len(_COLUMNS)}"
    before = PAGE.read_text().partition("|---|---|---|---|")[2].partition("\n\n")[0].splitlines()[1:]
    every = {line.split(" | ")[0]: line for line in (*before, *rows)}
    return "\n".join([_INTRODUCTION, header, *every.values(), "", _FOOTER])


def main(names: list[str]) -> None:
    rows: list[str] = []
    for name in names or MODELS:
        rows.append(row(MODELS[name]))
        print(rows[-1], file=sys.stdout if names else sys.stderr, flush=True)
        jax.clear_caches()
    if not names:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
