"""What tests of materializing have to pretend."""

from collections.abc import Callable

import pytest


@pytest.fixture
def compilers_see(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes a device has, to what compiles beside the stream; CPU devices do not say it."""

    def see(nbytes: int) -> None:
        monkeypatch.setattr("lazymodel.extras.planning.background.device_memory", lambda device: nbytes)

    return see
