"""Values in torchrun's store are plain data, or signed before they are unpickled."""

import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

# A public name of torch.distributed, which does not export it to mypy.
from torch.distributed import HashStore

from gradparity.multiprocess import HarnessError
from gradparity.multiprocess.elastic import store as store_module
from gradparity.multiprocess.elastic.agent import Message
from gradparity.multiprocess.elastic.local_rank import CallRequest, ContextChange
from gradparity.multiprocess.elastic.membership import (
    Heartbeat,
    HeartbeatMonitor,
    Member,
    Membership,
)
from gradparity.multiprocess.elastic.store import (
    SECRET_VARIABLE,
    SignedStore,
    pack,
    torchrun_store,
    unpack,
)
from gradparity.multiprocess.messages import Context, Kind, Reply
from gradparity.multiprocess.outcomes import Collective
from gradparity.multiprocess.parent.root_cause import Fact
from gradparity.multiprocess.rank import worker
from gradparity.multiprocess.spec import CallOptions, WorldSpec

SECRET = "0123456789abcdef"
HIT: list[str] = []


class Bomb:
    """Runs code when it is unpickled."""

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


SCOPE = "run", "gradparity/0/2/agent0"


def test_a_wait_ends_while_pythons_clocks_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # regression: M16
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    looks = itertools.count()

    def check() -> None:
        assert next(looks) < 10_000, "it waits for ever"

    store = SignedStore(HashStore(), rank=0, scope=SCOPE)
    assert not store.wait("never", 0.05, check)


def test_a_flag_counts_how_often_it_was_set() -> None:
    store = SignedStore(HashStore(), rank=0, scope=SCOPE)
    assert [store.set_flag("fault"), store.set_flag("fault")] == [1, 2]
    assert store.wait("fault", 0.0)


def stores(raw: Any, agreed: str = "met") -> tuple[SignedStore, SignedStore]:
    """Return one store as ranks 0 and 1 of one run use it."""
    one, two = (SignedStore(raw, rank=rank, scope=SCOPE) for rank in range(2))
    return one.of_run(agreed), two.of_run(agreed)


@pytest.mark.parametrize("size", [0, 1, 4 << 20, 9 << 20])
def test_a_message_travels_and_the_last_reader_removes_it(size: int) -> None:
    raw, value = HashStore(), bytes(range(256)) * (size // 256) + b" " * (size % 256)
    (leader, one), (_, two) = stores(raw), stores(raw)
    before = raw.num_keys()
    leader.put_message("message", 1, value)
    for store in (one, two):
        assert store.take("message", 1, 0.0, author=0, readers=2) == value
    assert raw.num_keys() == before
    assert one.read("message/1", 0.0, author=0) is None


@pytest.mark.parametrize(
    "head",
    ["1", "1 ", "1 " + "0" * 64, "-1", "x", "", "9" * 5000, "0 " + "0" * 64 + " x"],
)
def test_an_unsigned_value_is_refused_before_it_is_unpickled(head: str) -> None:
    _, store = stores(HashStore())
    store.raw.set("message/1/0", pickle.dumps(Bomb()))  # type: ignore[arg-type]
    store.raw.set("message/1", head)
    with pytest.raises(HarnessError, match=r"message/1 in .* is not signed"):
        store.take("message", 1, 0.0, author=0)
    assert HIT == []


class Attacker:
    """Reads and writes the store, but does not have the secret."""

    def __init__(self, raw: HashStore) -> None:
        self.raw = raw

    def copy(self, key: str, to: str, into: HashStore | None = None) -> None:
        (into or self.raw).set(to, self.raw.get(key))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "author"), [("message/2", 0), ("start/0/1", 0), ("start/1/1", 1)]
)
def test_a_value_is_of_its_key_and_its_author(key: str, author: int) -> None:
    raw = HashStore()
    leader, follower = stores(raw)
    leader.put("message/1", b"run this")
    Attacker(raw).copy("message/1", key)
    with pytest.raises(HarnessError, match=f"{key} .* not signed by rank {author}"):
        follower.read(key, 0.0, author=author)


def test_an_agents_value_is_not_taken_for_the_leaders() -> None:
    raw = HashStore()
    leader, follower = stores(raw)
    follower.put("message/1", b"run this")  # with the right secret, by the wrong rank
    with pytest.raises(HarnessError, match="not signed by rank 0"):
        follower.read("message/1", 0.0, author=0)
    assert leader.read("message/1", 0.0, author=1) == b"run this"


@pytest.mark.parametrize("part", ["run", "prefix", "agreed"])
def test_a_value_of_another_run_is_refused(part: str) -> None:
    raw, later = HashStore(), HashStore()
    stores(raw)[0].put("message/1", b"run this")
    Attacker(raw).copy("message/1", "message/1", later)
    scope = {"run": SCOPE[0], "prefix": SCOPE[1], "agreed": "met", part: "another"}
    store = SignedStore(later, rank=1, scope=(scope["run"], scope["prefix"]))
    with pytest.raises(HarnessError, match="not signed by rank 0 for this run"):
        store.of_run(scope["agreed"]).read("message/1", 0.0, author=0)


def test_a_message_is_taken_once() -> None:
    raw = HashStore()
    leader, follower = stores(raw)
    attacker, kept = Attacker(raw), HashStore()
    for number in (1, 2):
        leader.put_message("message", number, b"run this")
        attacker.copy(f"message/{number}", f"message/{number}", kept)
        assert follower.take("message", number, 0.0, author=0) == b"run this"
    for number in (1, 2):
        Attacker(kept).copy(f"message/{number}", f"message/{number}", raw)
        with pytest.raises(HarnessError, match=f"message/{number} was read before"):
            follower.take("message", number, 0.0, author=0)


def test_a_message_that_is_delayed_is_taken_for_no_later_one() -> None:
    raw = HashStore()
    leader, follower = stores(raw)
    leader.put_message("message", 1, b"run this")
    kept = HashStore()
    Attacker(raw).copy("message/1", "message/1", kept)
    raw.delete_key("message/1")
    assert follower.take("message", 1, 0.01, author=0) is None
    Attacker(kept).copy("message/1", "message/2", raw)
    with pytest.raises(HarnessError, match=r"message/2 .* not signed"):
        follower.take("message", 2, 0.0, author=0)


def membership(raw: HashStore, rank: int) -> Membership:
    found = Membership(SignedStore(raw, rank=rank, scope=SCOPE), 2)
    found.join(gpus=0, local_size=2)
    return found


def nothing() -> None:
    """Do nothing: a ``check`` argument that never ends a wait."""


def test_agents_agree_on_a_run_that_was_never_before() -> None:
    values = []
    for _ in range(2):
        raw = HashStore()
        leader, follower = membership(raw, 0), membership(raw, 1)
        leader.run_store(nothing).put("message/1", b"run this")
        read = follower.run_store(nothing).read("message/1", 0.0, author=0)
        assert read == b"run this"
        values.append(raw.get("message/1"))
    assert values[0] != values[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_records_of_an_earlier_run_name_no_run_of_today(victim: int) -> None:
    before, raw = HashStore(), HashStore()
    agents = [membership(before, rank) for rank in range(2)]
    agents[1 - victim].run_store(nothing).put("note/x", b"of yesterday")
    # The victim is there; instead of the other it meets what was recorded of it.
    late = membership(raw, victim)
    for key in (f"member/{1 - victim}", "note/x"):
        Attacker(before).copy(key, key, raw)
    with pytest.raises(HarnessError, match="not signed by rank"):
        late.run_store(nothing).read("note/x", 0.0, author=1 - victim)


def test_only_named_variables_are_sent_to_other_agents() -> None:
    before = Context(cwd="/", path=(), env={"PATH": "/a", "KEY": "1", "OMP_X": "1"})
    now = Context(
        cwd="/",
        path=(),
        env={
            "PATH": "/b",
            "LD_LIBRARY_PATH": "/c",
            "KEY": "2",
            "AWS_SECRET_ACCESS_KEY": "3",
            "PATHS_TO_TOKEN": "4",
            "MY_OMP_TOKEN": "5",
            "NCCL_DEBUG": "INFO",
        },
    )
    change = ContextChange.between(before, now)
    assert change.env == {
        "PATH": "/b",
        "LD_LIBRARY_PATH": "/c",
        "OMP_X": None,
        "NCCL_DEBUG": "INFO",
    }


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def fail(*args: Any) -> Any:
                raise dist.DistNetworkError("Connection reset by peer")

            return fail

    gone: Any = Gone()
    with pytest.raises(HarnessError, match="torchrun's store is gone"):
        Heartbeat(gone, 1)
    monitor = HeartbeatMonitor(gone, 2)
    monitor._looked -= 10.0
    with pytest.raises(HarnessError, match="torchrun's store is gone"):
        monitor.silent()
    store = SignedStore(gone, rank=0, scope=SCOPE)
    calls: list[Callable[[], object]] = [
        lambda: store.put("key", b""),
        lambda: store.read("key", 0.0, author=0),
        lambda: store.take("key", 1, 0.0, author=0),
        lambda: store.set_flag("key"),
    ]
    for call in calls:
        with pytest.raises(HarnessError, match="torchrun's store is gone"):
            call()


def test_a_store_that_nobody_holds_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**env, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(worker, "_CONNECT_S", 1.0)
        with pytest.raises(HarnessError, match="torchrun's store is gone"):
            torchrun_store("agent0")


def test_hosts_with_other_secrets_get_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = SignedStore(HashStore(), rank=0, scope=SCOPE)
    store.put("member/0", b"hello")
    secret = tmp_path / "gradparity" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert os.listdir(secret.parent) == ["secret"]
    store_module._secret.cache_clear()
    assert (
        store.read("member/0", 0.0, author=0) == b"hello"
    )  # by another process of the host
    store_module._secret.cache_clear()
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with pytest.raises(HarnessError, match=SECRET_VARIABLE) as caught:
        store.read("member/0", 0.0, author=0)
    assert str(secret) in str(caught.value)


def test_a_short_secret_and_no_secret_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gradparity").touch()  # no folder
    with pytest.raises(HarnessError, match=SECRET_VARIABLE):
        SignedStore(HashStore(), rank=0, scope=SCOPE).put("key", b"")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET[1:])
    with pytest.raises(HarnessError, match="at least 16 characters"):
        SignedStore(HashStore(), rank=0, scope=SCOPE).put("key", b"")


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
                context=ContextChange(env={"A": "1", "B": None}),
            ),
            Message,
        ),
        (3, Message),
        (Member(place="here", pid=1, gpus=0, local_size=2), Member),
        (
            Fact(
                rank=1,
                reply=Reply(kind=Kind.OK, ended_at_s=1.5, value=b"\x80"),
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
