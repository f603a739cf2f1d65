"""Exports of the packages: ``__all__`` is complete, sorted and true."""

import importlib

import pytest

ROOMS = ["scaler", "multiprocess", "fixtures", "conformance"]


@pytest.mark.parametrize("room", ROOMS)
def test_all_is_sorted_and_every_name_is_there(room: str) -> None:
    module = importlib.import_module(f"gradparity.{room}")
    names = list(module.__all__)
    # constants, then classes, then functions: the order of ruff's RUF022
    assert names == sorted(names, key=lambda n: (_kind(n), n))
    assert [name for name in names if not hasattr(module, name)] == []


def _kind(name: str) -> int:
    return 0 if name.isupper() else 1 if name[0].isupper() else 2
