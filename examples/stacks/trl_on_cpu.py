"""Stand-ins for datasets, pandas and pyarrow, which TRL imports, and a tokenizer.

Not a stack to run. docs/stacks.md has the reasons.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PACKAGES = "datasets datasets.fingerprint pandas pyarrow pyarrow.compute pyarrow.types"


class Rows(list[Any]):
    """Stand-in for a Dataset, which no loop here reads."""

    column_names = None


class Names(ModuleType):
    """Stand-in for a module; it has every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Rows if name == "Dataset" else type(name, (), {})


absent = [name for name in PACKAGES.split() if name not in sys.modules]
sys.modules.update({name: Names(name) for name in absent})
SFTConfig = importlib.import_module("trl.trainer.sft_config").SFTConfig
SFTTrainer: Any = importlib.import_module("trl.trainer.sft_trainer").SFTTrainer
GRPOConfig = importlib.import_module("trl.trainer.grpo_config").GRPOConfig
GRPOTrainer: Any = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
for trainer in (SFTTrainer, GRPOTrainer):  # nothing leaves this machine
    trainer._send_telemetry = lambda trainer: None
for name in absent:
    del sys.modules[name]
ROWS = Rows([{"input_ids": [0], "labels": [0]}])


def tokenizer() -> Any:
    """Return a tokenizer of two words; it is not used, as rows are already tokens."""
    words = Tokenizer(WordLevel({"end": 0, "word": 1}, unk_token="word"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end")
