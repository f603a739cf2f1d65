"""Facts from one forward of a model: its inputs, its output, its blocks."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from .source import Source

__all__ = ["ROWS", "Drawn", "Found", "probe"]

ROWS = 8
"""Number of rows of the batch: enough for 3 unequal micro-batches on 2 ranks."""
LENGTH = 16
SIDES = (32, 64, 224)
"""Image sizes to try if the model does not declare its own."""
MOST_LAYERS = 8
"""Number of layers that suggest shapes for an argument whose name suggests none. They
are the first layers with parameters."""
MOST_TRIALS = 32
_IDS = re.compile(r"(.*_)?(input_ids|token_ids|tokens?|ids|idx|src|tgt)")
_IMAGES = re.compile(r"pixel_values|(.*_)?(images?|imgs?)")
_MASK = re.compile(r".*mask")
_BESIDE = ("decoder_input_ids", "pixel_values")
"""Optional arguments that some models need in addition to their main one."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NORMS = nn.modules.batchnorm._NormBase  # noqa: SLF001  # the one base of both kinds
_BATCH = nn.modules.batchnorm._BatchNorm  # noqa: SLF001  # the one base of its kind


@dataclass(frozen=True)
class Drawn:
    """Random tensor: integers below ``high``, or values from 0 to 1 if ``high`` is 0.

    Values have one sign, like pixels. Gradients of the rows then add up, and are well
    above the rounding of half precision.
    """

    shape: tuple[int, ...]
    high: int = 0

    def draw(self, generator: torch.Generator) -> Tensor:
        """Create a tensor of this shape with random values."""
        if self.high:
            return torch.randint(self.high, self.shape, generator=generator)
        return torch.rand(self.shape, generator=generator)

    @property
    def code(self) -> str:
        """Source text that creates the tensor."""
        sizes = ", ".join(map(str, self.shape))
        if self.high:
            comma = "," if len(self.shape) == 1 else ""
            return f"torch.randint({self.high}, ({sizes}{comma}), generator=generator)"
        return f"torch.rand({sizes}, generator=generator)"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Facts about a model for a workload file, or the reason why they are missing."""

    problem: str = ""
    """Reason why no inputs were found."""
    inputs: Mapping[str, Drawn] = field(default_factory=dict)
    """Argument of forward -> tensor that is passed."""
    by_name: bool = False
    """True if forward gets its arguments by name, False if it gets one by position."""
    output: str = "output"
    """Source text of the output tensor, such as ``output.logits``."""
    targets: Drawn = Drawn((ROWS,))
    blocks: tuple[str, ...] = ()
    """Names of the modules to shard, or of the containers of these modules."""
    containers: bool = False
    """True if ``blocks`` has containers whose children are all sharded."""
    norms: bool = False
    """True if a batch norm uses the statistics of a batch."""
    scalars: tuple[str, ...] = ()
    """Names of parameters without dimensions."""
    seldom: tuple[str, ...] = ()
    """Names of modules that forward calls for some rows only, such as experts."""

    @property
    def refused(self) -> str:
        """Reason why the layout in the file cannot shard the model; empty if it can."""
        if self.seldom:
            names = ", ".join(self.seldom[:4])
            return (
                f"parallelize: forward calls {names} for some rows only, and "
                "fully_shard needs the same calls on all ranks: call them for any "
                "rows, or use DistributedDataParallel with find_unused_parameters=True"
            )
        if not self.scalars:
            return ""
        return (
            f"parallelize: fully_shard takes no scalar ({', '.join(self.scalars)}): "
            "make it nn.Parameter(torch.zeros(1)), or use another layout"
        )

    @property
    def lines(self) -> list[str]:
        """Facts as text, for the user to check."""
        if self.problem:
            return []
        inputs = [f"{name} {_size(drawn)}" for name, drawn in self.inputs.items()]
        loss = "cross entropy" if self.targets.high else "mean squared error"
        blocks = "children of " if self.containers else ""
        return [
            f"inputs: {', '.join(inputs)}",
            f"loss:   {loss} of {self.output} and targets {_size(self.targets)}",
            f"blocks: {blocks}{', '.join(self.blocks) or 'none: the whole is sharded'}",
        ]


def _size(drawn: Drawn) -> str:
    below = f", integers below {drawn.high}" if drawn.high else ""
    return f"{list(drawn.shape)}{below}"


def probe(source: Source) -> Found:
    """Try inputs until one forward gives an output that depends on the parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = source.make()
        problem = ""
        for inputs, by_name in itertools.islice(_trials(model), MOST_TRIALS):
            generator = torch.Generator().manual_seed(0)
            drawn = {name: each.draw(generator) for name, each in inputs.items()}
            calls: Counter[nn.Module] = Counter()
            try:
                with _counting(model, calls), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # `run` shows them
                    output = model(**drawn) if by_name else model(*drawn.values())
            except Exception as error:  # a user's code may raise any
                shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in drawn.items())
                text = " ".join(str(error).split())[:200]
                refusal = f"with {shapes} it raised {type(error).__name__}: {text}"
                problem = problem or refusal
                continue
            path, value = next(_differentiable(output), ("", None))
            if value is None:
                kind = type(output).__name__
                problem = problem or f"it returned {kind}, no tensor to train"
                continue
            seldom = _called_for_some_rows(model, drawn, by_name, calls)
            blocks, containers = _blocks(model, calls)
            return Found(
                inputs=inputs,
                by_name=by_name,
                output=path,
                targets=_targets(path, value, inputs),
                blocks=blocks,
                containers=containers,
                norms=_has_norms(model),
                scalars=tuple(n for n, p in model.named_parameters() if not p.ndim),
                seldom=seldom,
            )
    return Found(problem=problem or "its forward takes no argument")


@contextmanager
def _counting(model: nn.Module, calls: Counter[nn.Module]) -> Iterator[None]:
    """Count the calls of each module in this context."""
    hooks = [
        module.register_forward_hook(lambda m, *_: calls.update([m]))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _called_for_some_rows(
    model: nn.Module,
    drawn: Mapping[str, Tensor],
    by_name: bool,
    calls: Mapping[Any, int],
) -> tuple[str, ...]:
    """Return the outermost modules that a forward of a single row may leave out."""
    seldom: set[str] = set()
    for row in range(ROWS):
        one = {n: t[row : row + 1] if len(t) == ROWS else t for n, t in drawn.items()}
        of_row: Counter[nn.Module] = Counter()
        with _counting(model, of_row), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(Exception):  # a user's code may refuse a single row
                model(**one) if by_name else model(*one.values())
                for name, module in model.named_modules():
                    if calls.get(module) and not of_row[module]:
                        if next(module.parameters(), None) is not None:
                            seldom.add(name)
    outermost = {n for n in seldom if not any(n.startswith(f"{m}.") for m in seldom)}
    return tuple(name for name, _ in model.named_modules() if name in outermost)


# - Inputs


def _trials(model: nn.Module) -> Iterator[tuple[dict[str, Drawn], bool]]:
    """Yield (arguments to try, True if they are passed by name), likely ones first."""
    parameters = [
        p
        for p in signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    names = [p.name for p in parameters]
    for chosen in _chosen(model, parameters) if names else [["input"]]:
        by_name = len(chosen) > 1 or (bool(names) and chosen != names[:1])
        kinds = [list(_candidates(model, name)) for name in chosen]
        for drawn in itertools.product(*kinds):
            yield dict(zip(chosen, drawn, strict=True)), by_name


def _chosen(model: nn.Module, parameters: Sequence[Parameter]) -> Iterator[list[str]]:
    """Yield names of arguments to pass: the required ones, or the main one."""
    names = [p.name for p in parameters]
    needed = [p.name for p in parameters if p.default is p.empty]
    if needed:
        yield needed
        return
    main = getattr(model, "main_input_name", None)  # transformers has it
    if main not in names:
        usual = (n for n in names if _IDS.fullmatch(n) or _IMAGES.fullmatch(n))
        main = next(usual, names[0])
    yield [main]
    for other in _BESIDE:
        if other in names and other != main:
            yield [main, other]


def _candidates(model: nn.Module, name: str) -> Iterator[Drawn]:
    """Yield tensors to try for an argument.

    The argument's name suggests their shapes; if it does not, the first layers do.
    """
    words, sides = _words(model), list(_sides(model))
    layers = [m for m in model.modules() if any(True for _ in m.parameters(False))]
    channels = [m.in_channels for m in layers if isinstance(m, nn.Conv2d)]
    images = [Drawn((ROWS, c, s, s)) for c in (channels or [3])[:1] for s in sides]
    ids = [Drawn((ROWS, LENGTH), words)] if words else []
    if _IDS.fullmatch(name):
        yield from ids
    elif _MASK.fullmatch(name):
        yield Drawn((ROWS, LENGTH), 1)
    elif _IMAGES.fullmatch(name):
        yield from images
    else:
        for layer in layers[:MOST_LAYERS]:
            match layer:
                case nn.Embedding():
                    yield Drawn((ROWS, LENGTH), layer.num_embeddings)
                case nn.Linear():
                    yield Drawn((ROWS, layer.in_features))
                    yield Drawn((ROWS, LENGTH, layer.in_features))
                case nn.Conv1d():
                    yield Drawn((ROWS, layer.in_channels, LENGTH))
                case nn.Conv2d():
                    yield from images
                case nn.Conv3d():
                    yield Drawn((ROWS, layer.in_channels, LENGTH, LENGTH, LENGTH))
                case nn.RNNBase():
                    yield Drawn((ROWS, LENGTH, layer.input_size))
                case nn.LayerNorm():
                    yield Drawn((ROWS, LENGTH, *layer.normalized_shape))
        yield from [*ids, *images]


def _words(model: nn.Module) -> int:
    """Return the vocabulary size, from the model's configuration or an embedding."""
    stated = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(stated, int):
        return stated
    return next(
        (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 0
    )


def _sides(model: nn.Module) -> Iterator[int]:
    """Yield the image sizes that the model declares, or else the usual ones."""
    for owner in (getattr(model, "config", None), *model.modules()):
        for name in ("image_size", "img_size"):
            stated = getattr(owner, name, None)
            side = stated[0] if isinstance(stated, list | tuple) and stated else stated
            if isinstance(side, int):
                yield side
                return
    yield from SIDES


# - Output


def _differentiable(output: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield (source text, tensor) of outputs that need gradients; logits come first."""
    if isinstance(output, Tensor):
        if output.requires_grad and output.is_floating_point() and output.ndim:
            yield path, output
        return
    if isinstance(output, Mapping):
        names = sorted(output, key=lambda name: name != "logits")
        for name in names:
            attribute = isinstance(name, str) and getattr(output, name, None)
            # in double quotes, as formatters write them
            key = json.dumps(name) if isinstance(name, str) else repr(name)
            way = f".{name}" if attribute is output[name] else f"[{key}]"
            yield from _differentiable(output[name], path + way)
    elif isinstance(output, list | tuple):
        for number, each in enumerate(output):
            yield from _differentiable(each, f"{path}[{number}]")
    elif hasattr(output, "__dict__"):
        for name in sorted(vars(output), key=lambda name: name != "logits"):
            yield from _differentiable(vars(output)[name], f"{path}.{name}")


def _targets(path: str, value: Tensor, inputs: Mapping[str, Drawn]) -> Drawn:
    """Return random classes if the output may be scores, else values of its shape."""
    *rows, classes = value.shape
    first = next(iter(inputs.values()))
    scores = (classes > 1 and "hidden" not in path) and (
        # a score for each token, or for each row of tokens or images
        (bool(first.high) and tuple(rows) in (first.shape, first.shape[:1]))
        or (len(first.shape) == 4 and len(rows) == 1)
    )
    return Drawn(tuple(rows), classes) if scores else Drawn(tuple(value.shape))


# - Layout


def _blocks(
    model: nn.Module, calls: Mapping[nn.Module, int]
) -> tuple[tuple[str, ...], bool]:
    """Return names of repeated blocks, or names of their containers and True.

    A block is a child of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with at
    least two blocks of one type. Forward calls a block once. A block has children, or
    more than two parameters. Other modules must not use these parameters, because
    ``fully_shard`` gathers them only for the call of the block. Only the outermost
    blocks count.
    """
    containers: list[str] = []
    names: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        children = [(f"{name}.{n}".strip("."), m) for n, m in module.named_children()]
        blocks = [c for c in children if _is_block(model, c[1], calls)]
        kinds = Counter(type(block) for _, block in blocks)
        if isinstance(module, _CONTAINERS) and max(kinds.values(), default=0) > 1:
            names.extend(n for n, _ in blocks)
            if len(blocks) == len(children) and name:
                containers.append(name)
            children = [c for c in children if c not in blocks]
        for inner, child in children:
            visit(child, inner)

    visit(model, "")
    whole = sum(len([*model.get_submodule(name).children()]) for name in containers)
    if containers and whole == len(names):
        return tuple(containers), True
    return tuple(names), False


def _is_block(
    model: nn.Module, module: nn.Module, calls: Mapping[nn.Module, int]
) -> bool:
    own = {id(p) for p in module.parameters()}
    # a layer with a weight and a bias alone is too small; a GRU has four parameters
    composite = next(module.children(), None) is not None or len(own) > 2
    if not own or not composite or calls.get(module) != 1:
        return False
    inside = sum(
        id(p) in own for _, p in module.named_parameters(remove_duplicate=False)
    )
    every = sum(id(p) in own for _, p in model.named_parameters(remove_duplicate=False))
    return inside == every


def _has_norms(model: nn.Module) -> bool:
    """Return True if a norm couples rows, or averages its statistics over them."""
    norms = [m for m in model.modules() if isinstance(m, _NORMS) and m.training]
    return any(isinstance(m, _BATCH) or m.track_running_stats for m in norms)
