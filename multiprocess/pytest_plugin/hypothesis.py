"""Hypothesis on ranks: all draw the same examples, and agree on the result of each.

So every rank gets the same values, and shrinking stays in step. Ranks that draw
different values, or run different numbers of examples, fail at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis.errors import StopTest, UnsatisfiedAssumption

from .. import linux
from ..errors import CallEnded
from ..outcomes import Place
from ..rank.endings import early_end, name_of, refuse_unrun
from ..rank.flight_recorder import placed
from ..rank.world import World, current_world
from .internals import SETTINGS, drawn_choices

_OK, _REJECT, _FAIL = "ok", "reject", "fail"
_LEFT, _ENDED = "left", "ended"
"""Answers of a rank that runs no further example: it left the test, or has run all
of its examples."""

_LOOK_S = 0.0003
_GRACE_S = 0.3
"""Time that a rank whose example failed waits for the others; shorter than the parent's
grace period after a failure."""

_SEED = "_hypothesis_internal_use_seed"


class Agreed(Exception):
    """Raised on all ranks for an example that failed on some rank.

    Equal failures raise one subclass, so that hypothesis counts them as one failure.
    """

    own: BaseException | None = None
    """Failure of this rank, or None."""


class _Unshrunk(BaseException):
    """Ends the search of hypothesis with a failed example that is not shrunk.

    Raised if other ranks do not finish the same example, or drew other values.
    """

    def __init__(self, own: BaseException) -> None:
        super().__init__()
        self.own = own


class _Disagreement(Exception):
    """Ranks drew different values, or disagree on the examples in another way."""


class _Answer(NamedTuple):
    """Result of one example on one rank."""

    how: str
    origin: str = ""
    """Key of a failure; empty without one."""

    drawn: str = ""
    """Hash of the values that the rank drew."""


class OtherRankFailed(Exception):
    """The example failed only on another rank."""

    _gradparity_followed = True


class Steps:
    """Keeps the examples of one test in step with those of the other ranks."""

    def __init__(self, seed: int) -> None:
        """Begin a test.

        Args:
            seed: Seed of the draws, unless the test or the command line sets one.
        """
        self._seed = seed
        self._world = current_world()
        self._number = 0

    @contextmanager
    def of_state_machines(self) -> Iterator[None]:
        """Make state machines run the same steps on all ranks."""
        make = stateful.get_state_machine_test

        def made(*args: Any, **kwargs: Any) -> Callable[[], None]:
            test = make(*args, **kwargs)

            def run() -> None:
                __tracebackhide__ = True
                with self.of(test):
                    test()

            return run

        # hypothesis makes the test of each machine, a function with `@given`, by this
        # function. Another rank may run one more machine.
        with mock.patch.object(stateful, make.__name__, made), self._publishing_end():
            yield

    @contextmanager
    def of(self, test: Any) -> Iterator[None]:
        """Make a test with ``@given`` run the same examples on all ranks.

        Args:
            test: Function that pytest calls.
        """
        __tracebackhide__ = True
        owner = getattr(test, "__func__", test)
        handle = test.hypothesis
        body, before = handle.inner_test, dict(vars(owner))

        @functools.wraps(body)
        def step(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            self._run(body, args, kwargs)

        settings = getattr(owner, SETTINGS, None) or hypothesis.settings()
        adapted = hypothesis.settings(
            settings,
            # An example may be slow because its rank waits for another rank.
            deadline=None,
            # Ranks that read other examples, or other clocks, would disagree.
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            # This phase would explain which lines of the harness ran.
            phases=[p for p in settings.phases if p is not hypothesis.Phase.explain],
            report_multiple_bugs=False,
        )
        setattr(owner, SETTINGS, adapted)
        if getattr(owner, _SEED, None) is None:
            hypothesis.seed(self._seed)(owner)
        # Hypothesis offers this hook for other test runners.
        handle.inner_test = step
        own: BaseException | None = None
        try:
            with self._publishing_end():
                yield
        except (Agreed, _Unshrunk) as error:
            own = error.own or OtherRankFailed(str(error))
            for note in getattr(error, "__notes__", []):
                own.add_note(note)
            if isinstance(own, _Disagreement):  # its traceback shows only the harness
                text = "\n".join([str(own), *getattr(own, "__notes__", [])])
                own = pytest.fail.Exception(text, pytrace=False)
        finally:
            handle.inner_test = body
            for name in (SETTINGS, _SEED):
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    vars(owner).pop(name, None)
        if own is not None:
            context = own.__context__
            try:
                raise own
            finally:  # the error that only ended the search is not the cause
                own.__context__ = context

    def _run(self, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run one example; raise the exception on which all ranks agree."""
        __tracebackhide__ = True
        own: BaseException | None = None
        try:
            refuse_unrun("the test", body(*args, **kwargs))
        except (Exception, StopTest, pytest.fail.Exception) as error:
            own = error
        except BaseException as error:
            if early_end(error) is not None:
                self._publish(_Answer(_LEFT))
            raise
        how = _how(own)
        origin = _origin(own) if own is not None and how == _FAIL else ""
        self._publish(_Answer(how, origin, _hash(drawn_choices())))
        if how == _FAIL and not self._all_there(_GRACE_S):
            assert own is not None
            raise _unshrunk(own, kwargs, " since other ranks wait")
        self._all_there(None)
        self._agree(own, self._answers(), kwargs)

    def _agree(
        self,
        own: BaseException | None,
        answers: Sequence[_Answer],
        kwargs: dict[str, Any],
    ) -> None:
        """Raise the exception of an example that did not pass on all ranks."""
        __tracebackhide__ = True
        self._number += 1
        ranks_by_how: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            ranks_by_how.setdefault(answer.how, []).append(rank)
        differ = [r for r, a in enumerate(answers) if a.drawn != answers[0].drawn]
        if failed := ranks_by_how.get(_FAIL):
            text = f"failed on rank {failed}"
            if not differ:
                _raise_agreed(answers[failed[0]].origin, text, own)
            if own is None or _how(own) != _FAIL:
                own = OtherRankFailed(f"the example {text}")
            raise _unshrunk(own, kwargs, " since the ranks drew different values")
        if left := ranks_by_how.get(_LEFT):
            raise _Unshrunk(OtherRankFailed(f"rank {left[0]} left the test"))
        if ended := ranks_by_how.get(_ENDED):
            raise _Unshrunk(
                _Disagreement(
                    f"the ranks run different numbers of examples: rank {ended} has "
                    "run all of its examples, and this rank ran another one"
                )
            )
        drew = f"rank {differ} drew other values for an example than rank 0"
        if len(ranks_by_how) > 1:
            rejects = ranks_by_how[_REJECT]
            text = f"the ranks do not agree on an example: ranks {rejects} reject it"
            if not differ:
                _raise_agreed("reject", text, _Disagreement(text))
            raise _unshrunk(_Disagreement(f"{text}, and {drew}"), kwargs)
        if differ:
            text = f"{drew}: every rank must draw the same values in the same order"
            raise _unshrunk(_Disagreement(text), kwargs)
        if own is not None:
            raise own

    def _key(self, rank: int) -> str:
        return f"example/{self._number}/{rank}"

    def _publish(self, answer: _Answer) -> None:
        self._world.store.set(self._key(self._world.rank), json.dumps(answer))

    @contextmanager
    def _publishing_end(self) -> Iterator[None]:
        """Publish at the end of the block that this rank runs no further example."""
        end = _ENDED
        try:
            yield
        except CallEnded:  # the parent ends all ranks
            end = ""
            raise
        except BaseException:  # also one that a test raises to end early
            end = _LEFT
            raise
        finally:
            if end:
                self._publish_end(end)

    def _publish_end(self, how: str) -> None:
        """Publish that this rank runs no further example of this test."""
        # the answer to an example that other ranks did not finish stays
        if not self._world.store.check([self._key(self._world.rank)]):
            self._publish(_Answer(how))
        self._number += 1

    def _all_there(self, limit_s: float | None) -> bool:
        keys = [self._key(rank) for rank in range(self._world.world_size)]
        # The store's own wait looks only every 10 ms.
        began = linux.now_s()
        with placed(Place.DONE):
            while not self._world.store.check(keys):
                if limit_s is not None and linux.now_s() - began > limit_s:
                    return False
                linux.sleep(_LOOK_S)
        return True

    def _answers(self) -> list[_Answer]:
        world: World = self._world
        values = [world.store.get(self._key(rank)) for rank in range(world.world_size)]
        return [_Answer(*json.loads(value)) for value in values]


def _how(error: BaseException | None) -> str:
    if error is None:
        return _OK
    # If Hypothesis ends a draw early, it does so on all ranks.
    return _REJECT if isinstance(error, UnsatisfiedAssumption | StopTest) else _FAIL


def _origin(error: BaseException) -> str:
    """Return a key that is equal for equal failures of examples."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}"
    return f"{name_of(type(error))} {where}:{0 if trace is None else trace.tb_lineno}"


def _hash(choices: object) -> str:
    text = repr(choices).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _unshrunk(own: BaseException, kwargs: dict[str, Any], why: str = "") -> _Unshrunk:
    """Return an exception that ends the search; note the example on ``own``."""
    shown = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
    own.add_note(f"the example, not shrunk{why}: {shown}")
    return _Unshrunk(own)


_kinds: dict[str, type[Agreed]] = {}


def _raise_agreed(origin: str, text: str, own: BaseException | None) -> NoReturn:
    __tracebackhide__ = True
    kind = _kinds.setdefault(origin, type("Agreed", (Agreed,), {}))
    error = kind(f"the example {text}")
    error.own = own
    raise error
