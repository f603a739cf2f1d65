"""What runs in a rank: join, run, answer, until the parent is gone.

Imports the least: the forkserver loads this module before torch; what needs torch is
imported when a rank has been forked, from what the forkserver has preloaded.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import os
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from .. import linux, pickling, wire
from ..messages import NO_TERMINAL, Context, Kind, Meeting, Reply, Run, Start
from . import assert_rewrite as rewriting
from . import coverage as measuring
from . import trail
from .preloads import COSTLY

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ..spec import WorldSpec
    from .world import World

_GROUP_TIMEOUT = datetime.timedelta(hours=2)
"""Beyond any deadline of the parent: it knows who hangs, the group only who waits."""

_MOST_GROUPS = 48
"""So many process groups are left behind by earlier calls before all are made anew."""

_OUR_FILES = tuple(
    __file__.replace("rank/worker.py", name)
    for name in ("rank/worker.py", "pytest_plugin/remote.py", "torchrun.py")
)
"""Their frames say nothing about what the function did."""

_FOREIGN_ENVIRONMENT = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")


def main(
    sock_fd: int, output_fd: int, stacks_fd: int, store_fd: int, trail_fd: int
) -> int:
    """Live as a rank; return the exit code."""
    _take_streams(output_fd)
    faulthandler.enable(file=stacks_fd)
    faulthandler.register(linux.STACKS_SIGNAL, file=stacks_fd, chain=False)
    sys.breakpointhook = _breakpoint
    with socket.socket(fileno=sock_fd) as sock:
        rank = _Rank(sock, store_fd, trail_fd)
        while (message := wire.receive(sock)) is not None:
            wire.send(sock, rank.answer(message))
    return 0


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """What ``breakpoint()`` does on a rank: pdb would read the end of a file."""
    if os.environ.get("PYTHONBREAKPOINT") is None:
        raise RuntimeError(NO_TERMINAL)
    return sys.__breakpointhook__(*args, **kwargs)


class _Rank:
    """One rank's state between messages."""

    def __init__(self, sock: socket.socket, store_fd: int, trail_fd: int) -> None:
        self._sock = sock
        self._store_fd = store_fd
        self._trail_fd = trail_fd
        self._known = _costly_modules()
        self._groups_made = 0
        self._runs = 0
        self._measuring = measuring.Measuring()

    def answer(self, message: Start | Run) -> Reply:
        """Do what the message asks; whatever goes wrong becomes the reply."""
        try:
            if isinstance(message, Start):
                self._join(message)
                reply = _reply(Kind.READY)
            else:
                reply = self._run(message)
        except BaseException as error:
            reply = _raised(error, reusable=False)
        finally:
            self._measuring.save()
            _flush()
        return reply

    def _join(self, message: Start) -> None:
        import torch

        from . import flight_recorder as recorder
        from . import world as world_module

        spec, self._spec, self._rank = message.spec, message.spec, message.rank
        self._meeting = message.meeting
        self._take(message.context)
        os.environ.update(_rank_environment(spec, message.rank, self._meeting))
        torch.set_num_threads(spec.threads)
        self._world: World = world_module.World(
            rank=message.rank,
            size=spec.size,
            backend=spec.backend,
            device=_device(spec, _local_rank(message.rank, self._meeting)),
            seed=spec.seed,
            make_store=lambda: self._open_store(f"run{self._runs}"),
        )
        world_module._set_current(self._world)
        self._trail = trail.TrailWriter(self._trail_fd, message.rank, spec.size)
        recorder.install(self._trail)
        self._make_group()

    def _take(self, context: Context) -> None:
        _take_context(context)
        self._measuring.follow(context.measured)

    def _open_store(self, prefix: str) -> Store:
        if self._meeting is not None:
            from ..elastic import store as mail

            meeting = self._meeting
            within = f"{meeting.prefix}/{prefix}"
            return mail.connect(meeting.host, meeting.port, within)
        # Public names of torch.distributed, which does not export them to mypy.
        from torch._C._distributed_c10d import FileStore, PrefixStore

        # A file without a name: nothing to remove, whoever dies.
        store = FileStore(f"/proc/self/fd/{self._store_fd}", self._spec.size)
        return PrefixStore(prefix, store)

    def _make_group(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._world._new_group()
        self._groups_made += 1
        dist.init_process_group(
            self._spec.backend,
            store=self._open_store(f"group{self._groups_made}"),
            rank=self._rank,
            world_size=self._spec.size,
            timeout=_GROUP_TIMEOUT,
            device_id=self._world.device if self._spec.backend == "nccl" else None,
        )
        self._group = dist.group.WORLD

    def _run(self, message: Run) -> Reply:
        from .global_state import restored_settings, seed_everything

        if message.context is not None:
            self._take(message.context)
            found = _rank_environment(self._spec, self._rank, self._meeting)
            os.environ.update(found)
        if message.fresh_group:
            self._make_group()
        self._runs = message.number
        self._trail.clear()
        self._world._new_call()
        with restored_settings():
            seed_everything(self._spec.seed)
            try:
                value = _call(message.payload)
                reply = _reply(Kind.OK, value=_pickled_result(value))
            except BaseException as error:
                reply = _raised(error, reusable=True)
        return dataclasses.replace(
            reply,
            reusable=self._reusable(),
            imported=tuple(sorted(_costly_modules() - self._known)),
        )

    def _reusable(self) -> bool:
        import torch.distributed as dist

        return (
            dist.is_initialized()
            and dist.group.WORLD is self._group
            and len(dist.distributed_c10d._world.pg_map) < _MOST_GROUPS
        )


def _costly_modules() -> frozenset[str]:
    return frozenset(name for name in COSTLY if name in sys.modules)


def _call(payload: bytes) -> object:
    fn, args, kwargs = pickling.loads(payload)
    return fn(*args, **kwargs)


def _pickled_result(value: object) -> bytes:
    from ..errors import NotPicklableError

    try:
        return pickling.dumps(value)
    except Exception as error:
        kind = type(value).__qualname__
        raise NotPicklableError(
            f"the function returned a {kind} that cannot be pickled "
            f"({type(error).__name__}: {error}); return plain values or tensors"
        ) from error


def _reply(kind: Kind, **fields: Any) -> Reply:
    return Reply(kind=kind, ended_at_s=time.monotonic(), **fields)


def _raised(error: BaseException, reusable: bool) -> Reply:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    return _reply(
        Kind.RAISED,
        exception=_pickled_exception(error),
        error_type=name,
        message=_encodable(_text(error)),
        traceback=_encodable(_traceback(error)),
        reusable=reusable,
    )


def _pickled_exception(error: BaseException) -> bytes | None:
    try:
        pickled = pickling.dumps(error)
        pickling.loads(pickled)  # many exceptions pickle but do not come back
    except Exception:  # its type, text and traceback go as text
        return None
    return pickled


def _encodable(text: str) -> str:
    """Without lone surrogates, as in names of files that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:
        return f"(its text cannot be had: {type(worse).__name__})"


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FILES:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # its own text raises: the frames are what there is to tell
        return "".join(traceback.format_tb(frames))


def _take_streams(output_fd: int) -> None:
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    for fd in (1, 2):
        os.set_inheritable(fd, True)
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)


def _text_stream(fd: int) -> Any:
    return open(
        fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (ValueError, OSError):
            pass  # the function closed it


def _take_context(context: Context) -> None:
    os.chdir(context.cwd)
    sys.path[:] = context.path
    os.environ.clear()
    os.environ.update(
        (name, value)
        for name, value in context.env.items()
        if not name.startswith(_FOREIGN_ENVIRONMENT)
    )
    rewriting.take_modules(context.modules)


def _local_rank(rank: int, meeting: Meeting | None) -> int:
    return rank if meeting is None else meeting.local_rank


def _rank_environment(
    spec: WorldSpec, rank: int, meeting: Meeting | None
) -> dict[str, str]:
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(_local_rank(rank, meeting)),
        "WORLD_SIZE": str(spec.size),
        "LOCAL_WORLD_SIZE": str(meeting.local_size if meeting else spec.size),
    }
    if spec.visible_devices:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
    here = meeting is None or meeting.one_host
    if here and "GLOO_SOCKET_IFNAME" not in os.environ and _has_loopback():
        found["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    return found


def _has_loopback() -> bool:
    return any(name == "lo" for _, name in socket.if_nameindex())


def _device(spec: WorldSpec, rank: int) -> Any:
    import torch

    if spec.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(f"rank {rank} has no CUDA device: none is visible")
    if rank >= count and not spec.share_devices:
        raise RuntimeError(
            f"rank {rank} has no CUDA device of its own: {count} visible. "
            "share_devices=True lets ranks with backend gloo share them."
        )
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device
