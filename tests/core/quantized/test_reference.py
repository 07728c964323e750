"""Forms of compressed-tensors against what that package itself makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazymodel as lm
from tests.quantized import F8, FORMS, settings, write_folder

REASON = "needs the packages compressed-tensors and torch"
# Without groups in any order, which the package reads no more.
NAMES = [n for n, f in FORMS.items() if f.config["quant_method"] == "compressed-tensors" and n != "pack-4-order"]


@pytest.mark.large
@pytest.mark.parametrize("name", NAMES)
def test_as_the_package_decodes(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    compressors = pytest.importorskip("compressed_tensors.compressors", reason=REASON)
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=REASON)
    form = FORMS[name]
    parts, _ = form.make(np.random.default_rng(7), 64, 96)

    def tensor(array: np.ndarray) -> Any:
        for kind, of_torch in ((F8, torch.float8_e4m3fn), (form.dtype, torch.bfloat16)):
            if array.dtype == kind and array.dtype != np.float16:
                return torch.from_numpy(array.view(f"i{array.itemsize}").copy()).view(of_torch)
        return torch.from_numpy(array.copy())

    group = form.config["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(**{**group, "weights": quantization.QuantizationArgs(**group["weights"])})
    compressor = compressors.BaseCompressor.get_value_from_registry(form.config["format"])
    state = {ending: tensor(part) for ending, part in parts.items()}
    expected = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16).view(torch.int16).numpy()
    write_folder(tmp_path / "m", settings(form), {f"layer.{ending}": part for ending, part in parts.items()})
    found = lm.open_checkpoint(tmp_path / "m")["layer.weight"].read().astype("bfloat16")
    np.testing.assert_array_equal(found.view(np.int16), expected)
