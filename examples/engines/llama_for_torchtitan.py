"""The Llama of `tiny.py` as a module of torchtitan: `--module llama_for_torchtitan --config tiny`.

Attention is SDPA; torchtitan's FlexAttention was not tried on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiny import LENGTH, RATE, STEPS, own_rows
from torch import Tensor, nn
from torch.nn.functional import pad
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

WIDTH, HEADS, INNER, VOCABULARY, LAYERS = 64, 4, 128, 128, 2
ANY = {"weight": nn.init.ones_, "bias": nn.init.zeros_}  # weights are loaded


class Rows(BaseDataLoader):
    """A data-parallel rank's rows of each step, so many at a time."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to say."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: object) -> None:
        del config
        self.place, self.parts, self.size = dp_rank, dp_world_size, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Ids and the next ones: [local_batch_size, LENGTH] each."""
        for step in range(STEPS):
            for ids in own_rows(step, self.place, self.parts).split(self.size):
                yield {"input": ids}, pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)

    def state_dict(self) -> dict[str, object]:
        """None."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """None."""


class NoTokenizer(BaseTokenizer):
    """Data are ids."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to say."""

    def __init__(self, config: Config, **_: object) -> None:
        del config
        super().__init__()

    def encode(self, *_: object, **__: object) -> list[int]:
        """Never asked for."""
        raise NotImplementedError

    def decode(self, *_: object, **__: object) -> str:
        """Never asked for."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Ids that there are."""
        return VOCABULARY


class Losses(MetricsProcessor):
    """What it logs anyway, and losses kept."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As it is."""

    def log(self, step: int, global_avg_loss: float, *rest: Any, **named: Any) -> None:
        """A step's loss, over all ranks."""
        super().log(step, global_avg_loss, *rest, **named)
        self.losses = [*getattr(self, "losses", []), global_avg_loss]


def model() -> Llama3Model.Config:
    """torchtitan's Llama 3, in the sizes of `tiny.make_model`."""
    norm = partial(RMSNorm.Config, normalized_shape=WIDTH, eps=1e-6, param_init=ANY)
    layer = partial(
        make_gqa_config, dim=WIDTH, n_heads=HEADS, n_kv_heads=HEADS, wqkv_param_init=ANY, wo_param_init=ANY,
        inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=True,
        rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=LENGTH, theta=10000.0, scaling="none"),
    )  # fmt: skip
    ffn = partial(make_ffn_config, dim=WIDTH, hidden_dim=INNER, w1_param_init=ANY, w2w3_param_init=ANY)
    return Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=ANY),
        norm=norm(),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=ANY),
        layers=[
            Llama3TransformerBlock.Config(attention_norm=norm(), ffn_norm=norm(), attention=layer(), feed_forward=ffn())
            for _ in range(LAYERS)
        ],
    )


def tiny() -> Trainer.Config:
    """What the exported flags are laid over."""
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        hf_assets_path="llama",
        model_spec=ModelSpec(
            name="llama3", flavor="tiny", model=model(), parallelize_fn=parallelize_llama, pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None, state_dict_adapter=Llama3StateDictAdapter,
        ),
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(lr=RATE, betas=(0.9, 0.999), weight_decay=0.01),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
        training=TrainingConfig(seq_len=LENGTH, steps=STEPS, max_norm=1e9, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=Losses.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, initial_load_in_hf=True, last_save_in_hf=True, interval=STEPS),
    )  # fmt: skip
