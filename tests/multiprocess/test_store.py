"""What crosses torchrun's store is plain data, or signed before it is unpickled."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# A public name of torch.distributed, which does not export it to mypy.
from torch._C._distributed_c10d import HashStore

from gradparity.multiprocess import HarnessError
from gradparity.multiprocess.elastic import store as store_module
from gradparity.multiprocess.elastic.agent import Message
from gradparity.multiprocess.elastic.local_rank import CallRequest, ContextChange
from gradparity.multiprocess.elastic.membership import Member
from gradparity.multiprocess.elastic.store import (
    SECRET_VARIABLE,
    SignedStore,
    pack,
    unpack,
)
from gradparity.multiprocess.messages import Kind, Reply
from gradparity.multiprocess.outcomes import Collective
from gradparity.multiprocess.parent.watch import Fact
from gradparity.multiprocess.rank import worker
from gradparity.multiprocess.spec import CallOptions, WorldSpec

SECRET = "0123456789abcdef"
HIT: list[str] = []


class Bomb:
    """Does what it likes when it is unpickled."""

    def __reduce__(self) -> Any:
        return HIT.append, ("struck",)


@pytest.fixture(autouse=True)
def own_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store_module._secret.cache_clear()
    HIT.clear()
    yield
    store_module._secret.cache_clear()


@pytest.mark.parametrize("size", [0, 1, 9 << 20])
def test_a_value_travels_and_the_last_reader_removes_it(size: int) -> None:
    store, value = SignedStore(HashStore()), b"x" * size
    before = store.raw.num_keys()
    store.put("key", value)
    assert store.read("key", 0.0, readers=2) == value
    assert store.read("key", 0.0, readers=2) == value
    assert store.raw.num_keys() == before
    assert store.read("key", 0.0) is None


@pytest.mark.parametrize("count", ["1", "1 ", "1 " + "0" * 64, "-1", "x", ""])
def test_an_unsigned_value_is_refused_before_it_is_unpickled(count: str) -> None:
    store = SignedStore(HashStore())
    store.raw.set("message/1//0", pickle.dumps(Bomb()))  # type: ignore[arg-type]
    store.raw.set("message/1/", count)
    with pytest.raises(HarnessError, match=r"message/1/ in .* is not signed"):
        store.read("message/1/", 0.0)
    assert HIT == []


def test_a_value_is_signed_for_its_key_and_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SignedStore(HashStore())
    store.put("message/1/", b"run this")
    for part in ("", "/0"):
        copied = store.raw.get(f"message/1/{part}")
        store.raw.set(f"message/2/{part}", copied)  # type: ignore[arg-type]
    with pytest.raises(HarnessError, match="message/2/"):
        store.read("message/2/", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(HarnessError, match="message/1/"):
        store.read("message/1/", 0.0)


def test_hosts_with_other_secrets_get_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = SignedStore(HashStore())
    store.put("member/0", b"hello")
    secret = tmp_path / "gradparity" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert os.listdir(secret.parent) == ["secret"]
    store_module._secret.cache_clear()
    assert store.read("member/0", 0.0) == b"hello"  # by another process of the host
    store_module._secret.cache_clear()
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with pytest.raises(HarnessError, match=SECRET_VARIABLE) as caught:
        store.read("member/0", 0.0)
    assert str(secret) in str(caught.value)


def test_a_short_secret_and_no_secret_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gradparity").touch()  # no folder
    with pytest.raises(HarnessError, match=SECRET_VARIABLE):
        SignedStore(HashStore()).put("key", b"")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET[1:])
    with pytest.raises(HarnessError, match="at least 16 characters"):
        SignedStore(HashStore()).put("key", b"")


def raised() -> Reply:
    try:
        raise ValueError("no such file: \udcff")
    except ValueError as error:
        return worker.raised(error, reusable=True)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (
            CallRequest(
                spec=WorldSpec(world_size=2, preload=("a", "b")),
                options=CallOptions(timeout_s=3.0),
                payload=b"\x80\xff",
                world=1,
                fresh_group=False,
                context=ContextChange(env={"A": "1", "B": None}),
            ),
            Message,
        ),
        (3, Message),
        ([Fact(rank=0), Fact(rank=1, exit_code=3)], Message),
        (Member(place="here", pid=1, gpus=0, local_size=2), Member),
        (
            Fact(
                rank=1,
                reply=Reply(
                    kind=Kind.OK, ended_at_s=1.5, value=b"\x80", imported=("m",)
                ),
                collectives=(Collective("g", 1, "allreduce", "-", "a.py:1"),),
            ),
            Fact,
        ),
        (Fact(rank=0, reply=raised()), Fact),
        (Fact(rank=0, exit_code=-9), Fact),
    ],
)
def test_packed_values_unpack_to_equal_ones(value: Any, kind: Any) -> None:
    assert unpack(pack(value), kind) == value


@pytest.mark.parametrize("kind", [Message, Member, Fact])
def test_bytes_that_are_not_packed_are_refused(kind: Any) -> None:
    for packed in (pickle.dumps(Bomb()), b"", pack(Fact(rank=0))[:-1]):
        with pytest.raises(HarnessError, match="same version"):
            unpack(packed, kind)
    assert HIT == []
