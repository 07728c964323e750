"""Finding adapters by their framework's name."""

import pytest

import lazymodel as lm
from lazymodel._abstract import adapters


def test_named_says_what_is_known_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lm.LazyModelError, match="there is no adapter for 'torch'; known are keras, flax"):
        adapters.named("torch")
    monkeypatch.setitem(adapters._KNOWN, "keras", "lazymodel_of_nothing")
    with pytest.raises(lm.LazyModelError, match=r"need lazymodel_of_nothing, .*: pip install 'lazymodel\[keras\]'"):
        adapters.named("keras")
