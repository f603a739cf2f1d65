r"""Lookup-free quantization under DDP as a workload: the entropies of its codes.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.vector_quantize_lfq:SampleEntropy

Needs vector-quantize-pytorch. SampleEntropy ends with PASS, CodebookEntropy with FAIL.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from vector_quantize_pytorch import LFQ
from vector_quantize_pytorch.lookup_free_quantization import is_distributed

from .shared import Pair, Regression


class Net(nn.Module):
    """Model with codes of four bits; returns their entropy loss."""

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 4)
        self.quantizer = LFQ(
            dim=4,
            entropy_loss_weight=1.0,
            diversity_gamma=gamma,
            force_quantization_f32=False,
        )

    def forward(self, x: Tensor) -> Any:
        codes = self.encoder(x)[:, None]
        return self.quantizer(codes, inv_temperature=1.0).entropy_aux_loss


class SampleEntropy(Regression):
    """Loss that makes each row's code certain: a mean over rows."""

    gamma = 0.0

    def model(self) -> nn.Module:
        return Net(self.gamma)

    def loss(self, output: Any, targets: Tensor) -> Any:
        return output

    def micro_batches(self, batch: Pair) -> list[Pair]:
        return [batch]  # its rows are coupled

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        is_distributed.cache_clear()  # one process asked before
        return DistributedDataParallel(model, device_mesh=mesh)


class CodebookEntropy(SampleEntropy):
    """Faulty: the loss asks for equal use of all codes.

    See docs/wild/vector-quantize-pytorch-lfq-entropy.md.
    """

    gamma = 1.0
