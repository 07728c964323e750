#!/usr/bin/env bash
# JAX's persistent compilation cache keeps programs for TPU topologies that are not here, and cannot read them back.
#
# Versions: jax and jaxlib 0.10.2, libtpu 0.0.52, numpy 2.4.6, on a machine without a TPU.
#
# One would guess: compiling for a topology description (`jax.experimental.topologies`) takes part in the persistent
# cache, or does not. If the first process leaves an entry, the second one finds it and does not compile.
#
# Seen: the first process writes an entry. The second finds the entry, cannot load it ("PjRtCompiler must be constructed
# with a Client to call DeserializeLoadedExecutable"), warns, and compiles again. So each later process pays for the
# compiler, the lookup and a warning a program; the entry has the same name and is never of use. A program for the CPU
# in the same processes and folder is read back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH XLA_FLAGS JAX_COMPILATION_CACHE_DIR
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_HOSTNAMES=localhost
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.52 numpy==2.4.6
cat > "$folder/compile.py" <<'PY'
import os
import sys
import warnings

import jax
import jax.numpy as jnp
from jax import monitoring
from jax.experimental import topologies

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices[0]

for name, device in (("TPU", chip), ("CPU", jax.devices()[0])):
    x = jax.ShapeDtypeStruct((256, 256), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    hits.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(lambda a: jnp.tanh(a @ a)).lower(x).compile()
    texts = [str(each.message) for each in caught]
    unread = any("constructed with a Client to call DeserializeLoadedExecutable" in text for text in texts)
    entries = sum(each.endswith("-cache") for each in os.listdir(sys.argv[1]))
    print(f"{name} hits {len(hits)} unread {unread} entries {entries}")
PY
mkdir "$folder/cache"
for process in first second; do
  echo "$process process"
  "$folder/env/bin/python" "$folder/compile.py" "$folder/cache" 2> /dev/null | tee "$folder/$process"
done
diff "$folder/first" - <<'END'
TPU hits 0 unread False entries 1
CPU hits 0 unread False entries 2
END
diff "$folder/second" - <<'END'
TPU hits 0 unread True entries 2
CPU hits 1 unread False entries 2
END
echo "as written"
