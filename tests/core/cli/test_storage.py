"""`--storage-option` on the command line."""

import argparse

import pytest

from lazymodel._cli.main import main
from lazymodel._cli.storage import add_storage_options, storage_options
from lazymodel._errors import LazyModelError


def parsed(*texts):
    parser = argparse.ArgumentParser()
    add_storage_options(parser)
    return storage_options(parser.parse_args([part for text in texts for part in ("--storage-option", text)]))


def test_keys_and_values():
    assert parsed() is None
    found = parsed("region=eu", "token=a=b=", "client_options.allow_http=true", "client_options.timeout=3s")
    assert found == {"region": "eu", "token": "a=b=", "client_options": {"allow_http": True, "timeout": "3s"}}


@pytest.mark.parametrize("texts", [["SECRET"], ["=SECRET"], ["a=SECRET", "a=2"], ["a=SECRET", "a.b=2"]])
def test_what_cannot_be_read(texts):
    with pytest.raises(LazyModelError) as caught:
        parsed(*texts)
    assert "SECRET" not in str(caught.value)


def test_a_path_takes_none(tmp_path, capsys):
    assert main(["inspect", str(tmp_path), "--storage-option", "region=SECRET"]) == 2
    assert "SECRET" not in capsys.readouterr().err
