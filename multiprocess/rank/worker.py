"""Main loop of a rank: join, run, answer, until the parent is gone.

The forkserver loads this module before torch, so its imports are few. What needs torch
is imported after a rank has been forked, from modules that the forkserver preloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import os
import pickle
import pkgutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from .. import linux, messages
from ..environment import WORLD_VARIABLE
from ..messages import Context, Kind, Rendezvous, Reply, Run, Start
from ..outcomes import Failed
from . import assert_rewrite, flight_records
from .endings import name_of
from .frames import is_of_harness

if TYPE_CHECKING:
    from torch.distributed import Store

    from ..spec import WorldSpec
    from .world import World

PRELOAD = (
    "torch",
    "torch.distributed",
    f"{__package__}.flight_recorder",
    f"{__package__}.global_state",
    f"{__package__}.left_behind",
    f"{__package__}.world",
)
"""Modules that every rank needs; the forkserver imports them once."""

COSTLY = (
    "_pytest.assertion.rewrite",
    "hypothesis",
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
)
"""Modules that some ranks need and that are slow to import; preloaded if the parent has
them."""

ACKNOWLEDGED_S = 15.0
"""Seconds without an acknowledgement after which the store's host counts as cut off."""

_CONNECT_S = 60.0
"""Time limit for a connection to a store, and of an agent's waits for keys."""

_RANK_TIMEOUT = datetime.timedelta(hours=2)
"""Time limit of process groups and stores, longer than any deadline of the parent: only
the parent can distinguish the rank that hangs from those that wait for it."""

# A gloo group keeps 3 threads and 5 descriptors in a world of 2, and more in larger
# ones, until it is destroyed.
_MAX_GROUPS = 48
"""A rank with this many leftover process groups is not used again. The groups cannot be
destroyed instead: packages keep them in module variables and use them later."""

# Variables of the torchrun that runs the parent. A function that reads MASTER_ADDR
# (`init_method="env://"`) would join the parent's job and not this world. A rank has no
# secret either, since its results go through a store that others read.
_FOREIGN_ENVIRONMENT = (
    "TORCHELASTIC_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "GRADPARITY_SECRET",
)


def main(
    sock_fd: int, output_fd: int, stacks_fd: int, store_fd: int, records_fd: int
) -> int:
    """Run the main loop of a rank; return the exit code."""
    # Replace the descriptors and not sys.stdout alone: gloo and torch's C++ write
    # warnings to descriptor 2.
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    for fd in (1, 2):
        os.set_inheritable(fd, True)  # children of the rank write there, too
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    # Both write stacks from C, without the interpreter's lock: after a crash, and on a
    # signal of the parent.
    trace_crashes = partial(faulthandler.enable, file=stacks_fd)
    trace_crashes()
    faulthandler.register(linux.STACKS_SIGNAL, file=stacks_fd, chain=False)
    with socket.socket(fileno=sock_fd) as sock:
        channel = messages.Channel(sock)
        rank = _Rank(channel, store_fd, records_fd, trace_crashes)
        while received := channel.receive(wait=True):
            for message in received:
                channel.send(messages.packed(rank.answer(message)), wait=True)
                _give_memory_back()
    return 0


def _give_memory_back() -> None:
    """Free GPU memory that the call left, for other worlds and processes.

    Called after the reply is sent: freeing waits for the device, and a collective that
    a failed call started may block it for ever.
    """
    import torch

    for kind in (torch.cuda, torch.xpu):
        if kind.is_initialized():
            gc.collect()  # an exception holds the tensors of its frames in a cycle
            kind.empty_cache()


def connect(host: str, port: int, prefix: str, *, serves: bool = False) -> Store:
    """Connect to torchrun's store at ``host``; with ``serves`` also run its server."""
    from torch.distributed import PrefixStore, TCPStore

    limit = datetime.timedelta(seconds=_CONNECT_S)
    # torch does not show the socket of a store, so compare the sockets before and
    # after.
    before = linux.sockets()
    store = TCPStore(host, port, is_master=serves, timeout=limit)
    linux.give_up_silent(ACKNOWLEDGED_S, except_for=before)
    return PrefixStore(prefix, store)


def _text_stream(fd: int) -> Any:
    return open(
        fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


class _Rank:
    """State of one rank between messages."""

    def __init__(
        self,
        channel: messages.Channel,
        store_fd: int,
        records_fd: int,
        trace_crashes: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._trace_crashes = trace_crashes
        self._store_fd = store_fd
        self._records_fd = records_fd
        self._pid = linux.getpid()
        self._groups_made = 0
        self._runs = 0
        self._in_call = False
        self._context: Context | None = None
        sys.breakpointhook = _breakpoint
        signal.signal(linux.END_SIGNAL, self._end_call)

    def answer(self, message: Start | Run) -> Reply:
        """Carry out a message; an error becomes the reply."""
        try:
            if isinstance(message, Start):
                self._join(message)
                reply = made_reply(Kind.READY)
            else:
                reply = self._run(message)
        except BaseException as error:
            reply = raised(error, reusable=False)
        finally:
            linux.flush_standard_streams()
        return reply

    def _join(self, message: Start) -> None:
        import torch

        from . import flight_recorder
        from . import world as world_module

        spec, self._spec, self._rank = message.spec, message.spec, message.rank
        rendezvous = self._rendezvous = message.rendezvous
        self._take(message.context)
        torch.set_num_threads(spec.threads)
        self._world: World = world_module.World(
            rank=message.rank,
            world_size=spec.world_size,
            backend=spec.backend,
            device=_device(
                spec, message.rank if rendezvous is None else rendezvous.local_rank
            ),
            _make_store=lambda: self._open_store(f"run{self._runs}"),
            _begin=self._begin_call,
            _fail=self._report_failure,
            _trace_crashes=self._trace_crashes,
        )
        world_module._set_current(self._world)  # noqa: SLF001  # its own world
        self._records = flight_records.RecordWriter(
            self._records_fd, message.rank, spec.world_size
        )
        flight_recorder.install(self._records)
        self._make_group()

    def _take(self, context: Context) -> None:
        """Take over the parent's folder, import path and environment."""
        env = {
            name: value
            for name, value in context.env.items()
            if not name.startswith(_FOREIGN_ENVIRONMENT)
        }
        context = dataclasses.replace(context, env=env)
        before, self._context = self._context, context
        if before is None or before.cwd != context.cwd:
            os.chdir(context.cwd)
        if before is None or before.path != context.path:
            sys.path[:] = context.path
        if before is None:
            os.environ.clear()
            changed = env
        else:  # an environment that a session on this rank has set stays
            changed = {k: v for k, v in env.items() if before.env.get(k) != v}
            for name in before.env.keys() - env.keys():
                os.environ.pop(name, None)
        os.environ.update(changed)
        os.environ.update(_rank_environment(self._spec, self._rank, self._rendezvous))
        assert_rewrite.import_rewritten(context.modules)

    def _open_store(self, prefix: str) -> Store:
        from torch.distributed import FileStore, PrefixStore

        store: Store
        if self._rendezvous is not None:
            meet = self._rendezvous
            store = connect(meet.host, meet.port, f"{meet.prefix}/{prefix}")
        else:
            # A file without a name needs no removal, whatever ends first.
            path = f"/proc/self/fd/{self._store_fd}"
            store = PrefixStore(prefix, FileStore(path, self._spec.world_size))
        store.set_timeout(_RANK_TIMEOUT)
        return store

    def _make_group(self) -> None:
        import torch.distributed as dist

        from . import flight_recorder
        from .torch_internals import forget_meshes

        if dist.is_initialized():
            dist.destroy_process_group()
            forget_meshes()
        # Each group has its own prefix, because keys of an earlier group in the store
        # would be mistaken for its own. Meshes hold groups, so forget them, too.
        self._world._forget_meshes()  # noqa: SLF001  # its own world
        if not self._spec.default_group:
            return
        self._groups_made += 1
        options = self._spec.pg_options
        dist.init_process_group(
            self._spec.backend,
            store=self._open_store(f"group{self._groups_made}"),
            rank=self._rank,
            world_size=self._spec.world_size,
            timeout=_RANK_TIMEOUT,
            # With its device known, NCCL connects now. A rank that cannot take part
            # then fails while it joins, and not in the first call.
            device_id=self._world.device if self._connects_by_device() else None,
            pg_options=pkgutil.resolve_name(options)() if options else None,
        )
        self._group = dist.group.WORLD
        assert self._group is not None
        # Some backends connect later, and so could not learn the members by themselves.
        flight_recorder.note_members(self._group, range(self._spec.world_size))

    def _connects_by_device(self) -> bool:
        from torch.distributed import Backend, BackendConfig

        device = self._world.device.type
        backends = BackendConfig(Backend(self._spec.backend)).get_device_backend_map()
        return device != "cpu" and backends[device] != Backend.GLOO

    def _run(self, message: Run) -> Reply:
        import torch.distributed as dist

        from . import flight_recorder, left_behind
        from .global_state import restored_settings, seed_everything
        from .torch_internals import process_groups

        # Before a new group is made, since gloo and NCCL then read their variables.
        if message.context is not None:
            self._take(message.context)
        if message.fresh_group:
            self._make_group()
        self._runs += 1
        self._trace_crashes()  # an earlier call may have disabled this
        self._records.clear()
        flight_recorder.unwaited()
        left_behind.allow_present(only=True)
        self._world._new_call()  # noqa: SLF001  # its own world
        with restored_settings():
            seed_everything(self._spec.seed)
            try:
                fn, args, kwargs = pickle.loads(message.payload)
                left_behind.allow_present()  # threads of modules that were imported now
                self._in_call = True
                value = fn(*args, **kwargs)
                if not isinstance(value, Failed):
                    flight_recorder.wait_for_devices()
                reply = _returned(value)
            except BaseException as error:
                # SystemExit, too, since the reply has its traceback, and an exit code
                # would not.
                reply = raised(error, reusable=True)
            finally:
                self._in_call = False
        if linux.getpid() != self._pid:
            _end_child()
        # After a call that failed the ranks end, and one may still wait for a
        # collective.
        looks = message.is_test and reply.kind is Kind.OK
        left = left_behind.describe() if looks else ""
        if left:
            text = f"gradparity: the test has left {left}: new ranks take over\n"
            with contextlib.suppress(OSError):  # the function may have closed it
                os.write(2, text.encode())
        # A call may destroy or replace the group, which the next call needs.
        reusable = not left and (
            not self._spec.default_group
            or (
                dist.is_initialized()
                and dist.group.WORLD is self._group
                and process_groups() < _MAX_GROUPS
            )
        )
        return dataclasses.replace(reply, reusable=reusable)

    def _begin_call(self) -> None:
        from . import left_behind
        from .global_state import keep_settings, seed_everything

        seed_everything(self._spec.seed)  # imports may have drawn random numbers
        keep_settings()
        left_behind.allow_present()
        self._reply_early(made_reply(Kind.BEGUN))

    def _report_failure(self, failed: Failed) -> None:
        reply = _returned(failed)
        self._reply_early(
            dataclasses.replace(reply, tears_down=not failed.part, part=failed.part)
        )

    def _reply_early(self, reply: Reply) -> None:
        if linux.getpid() == self._pid:  # a forked child is no rank
            self._channel.send(messages.packed(reply), wait=True)

    def _end_call(self, number: int, frame: FrameType | None) -> None:
        """Raise ``CallEnded`` in the function; only once, so that teardown can end."""
        if self._in_call:
            from ..errors import CallEnded

            self._in_call = False
            raise CallEnded("the call has failed on another rank, and ends here, too")


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT") is not None:
        return sys.__breakpointhook__(*args, **kwargs)
    raise RuntimeError(
        "a rank has no terminal: print what you look for, or set PYTHONBREAKPOINT to a "
        "debugger that is reached over a socket (such as remote_pdb.set_trace), and "
        "raise timeout_s"
    )


def _end_child() -> NoReturn:
    """End a forked child that returned from the function: only the rank may answer."""
    text = (
        "gradparity: a child of this rank, made by os.fork(), came back from the "
        "function and was ended: end it there, by os._exit()\n"
    )
    os.write(2, text.encode())
    os._exit(1)


def pickled_result(value: object) -> bytes:
    """Return the pickled result of a function.

    Raises:
        NotPicklableError: The result cannot be pickled.
    """
    from ..errors import NotPicklableError

    try:
        return messages.pickled(value)
    except Exception as error:
        kind = type(value).__qualname__
        raise NotPicklableError(
            f"the function returned a {kind} that cannot be pickled "
            f"({type(error).__name__}: {error}); return plain values or tensors"
        ) from error


def _returned(value: object) -> Reply:
    """Return the reply of a rank whose function has returned."""
    if not isinstance(value, Failed):
        return made_reply(Kind.OK, value=pickled_result(value))
    reply = raised(value.error, reusable=True)
    return dataclasses.replace(
        reply,
        value=pickled_result(value.value),
        traceback=_encodable(value.traceback) or reply.traceback,
        left_a_wait=value.followed or reply.left_a_wait,
    )


def made_reply(kind: Kind, **fields: Any) -> Reply:
    """Return a reply with the current time."""
    return Reply(kind=kind, ended_at_s=linux.now_s(), **fields)


def raised(error: BaseException, reusable: bool) -> Reply:
    """Return the reply of a rank whose function raised."""
    exception: bytes | None
    try:
        exception = messages.pickled(error)
        pickle.loads(exception)  # many exceptions can be pickled, and not unpickled
    except (Exception, SystemExit):  # type, text and traceback are sent as text
        exception = None
    try:
        text = str(error)
    except (Exception, SystemExit) as worse:
        text = f"(its text cannot be had: {type(worse).__name__})"
    from .flight_recorder import left_a_wait

    return made_reply(
        Kind.RAISED,
        left_a_wait=left_a_wait(error),
        exception=exception,
        error_type=name_of(type(error)),
        message=_encodable(text),
        traceback=_encodable(_traceback(error)),
        reusable=reusable,
    )


def _encodable(text: str) -> str:
    """Replace lone surrogates, as in file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _of_a_harness(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if is_of_harness(file) or "__unittest" in frame.f_globals:
        return True
    return "/torch/testing/_internal/" in file and "/common_" in file


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__
    # Only the outermost frames, because a frame of ours between two of the test's is
    # part of what the test did.
    while frames is not None and _of_a_harness(frames.tb_frame):
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except (Exception, SystemExit):  # str() of it raises, so the frames are left
        return "".join(traceback.format_tb(frames))


def _rank_environment(
    spec: WorldSpec, rank: int, rendezvous: Rendezvous | None
) -> dict[str, str]:
    local_rank = rank if rendezvous is None else rendezvous.local_rank
    env = {
        WORLD_VARIABLE: "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(
            rendezvous.local_size if rendezvous else spec.world_size
        ),
    }
    if spec.visible_devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
    if spec.share_devices:
        # NCCL 2.31 and later; earlier ones refuse
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    # With several hosts gloo must listen on an address that the other hosts reach.
    if rendezvous is None or rendezvous.one_host:
        loopback = any(name == "lo" for _, name in socket.if_nameindex())
        if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
            env["GLOO_SOCKET_IFNAME"] = "lo"  # the name of the host need not resolve
    return env


def _device(spec: WorldSpec, local_rank: int) -> Any:
    import torch

    if spec.device == "cpu":
        return torch.device("cpu")
    kind = torch.get_device_module(spec.device)
    count = kind.device_count()
    name = spec.device.upper()
    if count == 0:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        why = f" (CUDA_VISIBLE_DEVICES is {chosen})" if spec.device == "cuda" else ""
        raise RuntimeError(
            f"rank {local_rank} has no {name} device: none is visible{why}; "
            'choose device="cpu"'
        )
    if local_rank >= count and not spec.share_devices:
        raise RuntimeError(
            f"rank {local_rank} has no {name} device of its own: {count} visible. "
            "share_devices=True lets ranks share them."
        )
    device = torch.device(spec.device, local_rank % count)
    kind.set_device(device)
    return device
