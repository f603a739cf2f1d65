"""The patch of docs/torch-patch.md, applied to the source of the installed torch."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.amp.grad_scaler
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gradparity.multiprocess import Cluster
from gradparity.tests.docs_blocks import ROOT, blocks
from gradparity.tests.stepping import INF, sgd

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the patch is for torch 2.13"
)
PAGE = ROOT / "docs" / "torch-patch.md"
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+")
# Loads the patched file in the place of torch's own, while torch itself is imported.
PLUGIN = """
import importlib.util, sys
class Patched:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.amp.grad_scaler":
            return importlib.util.spec_from_file_location(name, {source!r})
sys.meta_path.insert(0, Patched())
"""


def apply(patch: str, source: str) -> str:
    """Apply a unified diff of one file; every line of context must be there."""
    old, new, at = source.splitlines(), list[str](), 0
    for line in patch.splitlines():
        if line.startswith(("--- ", "+++ ")):
            continue
        if found := HUNK.match(line):
            start = int(found[1]) - 1
            new += old[at:start]
            at = start
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            assert line[1:] == old[at], f"line {at + 1} of torch's file differs"
            at += 1
            if not line.startswith("-"):
                new.append(line[1:])
    return "\n".join([*new, *old[at:]]) + "\n"


def patched_source() -> str:
    (patch,) = (block.text for block in blocks(PAGE) if block.language == "diff")
    return apply(patch, Path(str(torch.amp.grad_scaler.__file__)).read_text())


def patched(**settings: Any) -> Any:
    """Return a scaler of torch's class with the patch applied."""
    spec = importlib.util.spec_from_loader("patched_grad_scaler", loader=None)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module.__name__, module)
    exec(patched_source(), module.__dict__)
    scaler = module.GradScaler("cpu", init_scale=4.0, **settings)
    scaler.scale(torch.ones(()))
    return scaler


def weight(gradient: float | None) -> nn.Parameter:
    p = nn.Parameter(torch.ones(2))
    p.grad = None if gradient is None else torch.full((2,), gradient)
    return p


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("other", [4.0, None])
def test_the_ranks_of_a_group_skip_together(
    two: Cluster, fused: bool, other: float | None
) -> None:
    """Gradients are plain tensors, and one rank may have none."""

    def body() -> tuple[bool, float, list[float]]:
        p = weight(INF if dist.get_rank() == 1 else other)
        scaler = patched(process_group=dist.group.WORLD)
        optimizer = sgd(p, fused=fused)
        scaler.step(optimizer)
        scaler.update()
        return scaler.step_was_skipped(optimizer), scaler.get_scale(), p.tolist()

    assert two.run(body) == [(True, 2.0, [1.0, 1.0])] * 2


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("bad", [None, "plain", "sharded", "replicated"])
def test_plain_tensors_beside_dtensors(
    two: Cluster, grouped: bool, bad: str | None
) -> None:
    def body() -> tuple[bool, float]:
        mesh = init_device_mesh("cpu", (2,))
        gradients: dict[str, Any] = {}
        for name, placement in (("sharded", Shard(0)), ("replicated", Replicate())):
            whole = torch.full((2,), 4.0)
            gradients[name] = distribute_tensor(whole, mesh, [placement])
        gradients["plain"] = torch.full((2,), 4.0)
        if bad is not None and (bad == "replicated" or dist.get_rank() == 1):
            spoiled = gradients[bad]
            getattr(spoiled, "_local_tensor", spoiled)[0] = INF
        params: list[Any] = []
        for gradient in gradients.values():
            params.append(nn.Parameter(torch.ones_like(gradient)))
            params[-1].grad = gradient
        scaler = patched(process_group=dist.group.WORLD if grouped else None)
        optimizer = sgd(*params)
        scaler.unscale_(optimizer)
        divided = float(params[-1].grad[1])
        scaler.step(optimizer)
        return scaler.step_was_skipped(optimizer), divided

    seen = two.run(body)
    assert seen == [(bad is not None, 1.0)] * 2


def test_a_step_that_raises_leaves_no_attributes() -> None:
    scaler, p = patched(), weight(4.0)
    optimizer = sgd(p, fused=True)

    def refuse(*_: Any) -> None:
        assert optimizer.grad_scale is not None
        raise KeyError

    optimizer.register_step_pre_hook(refuse)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_overflows_on_two_devices_are_one_for_a_kernel() -> None:
    def moved(scaler: Any) -> bool:
        p = weight(4.0)
        optimizer = sgd(p, fused=True)
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        found.update({"one": torch.ones(()), "other": torch.ones(())})
        scaler.step(optimizer)
        return p.tolist() != [1.0, 1.0]

    theirs = torch.amp.GradScaler("cpu", init_scale=4.0)
    theirs.scale(torch.ones(()))
    assert moved(theirs)
    assert not moved(patched())


@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_is_known_for_each_optimizer_also_after_the_update(fused: bool) -> None:
    scaler, first, second = patched(), weight(4.0), weight(INF)
    optimizers = [sgd(p, fused=fused) for p in (first, second)]
    with pytest.raises(ValueError, match="not been called"):
        scaler.step_was_skipped(optimizers[0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.step_was_skipped(each) for each in optimizers] == [False, True]


@pytest.mark.slow
def test_our_tests_of_torchs_classes_pass_with_the_patch(tmp_path: Path) -> None:
    """Our tests run in a torch that has imported the patched file."""
    source = tmp_path / "grad_scaler.py"
    source.write_text(patched_source())
    plugin = tmp_path / "patched_torch.py"
    plugin.write_text(PLUGIN.format(source=str(source)))
    check = tmp_path / "test_it_is_patched.py"
    check.write_text(
        "import torch\n\n\ndef test_it_is_patched() -> None:\n"
        '    assert hasattr(torch.amp.GradScaler, "step_was_skipped")\n'
    )
    names = ["protocol", "ranks", "scale", "steps", "training"]
    files = [f"{ROOT}/tests/scaler/test_torch_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "patched_torch"]
    command += ["-p", "no:cacheprovider", "-c", f"{ROOT}/pyproject.toml"]
    done = subprocess.run(
        [*command, str(check), *files],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            "PYTHONPATH": str(tmp_path),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
