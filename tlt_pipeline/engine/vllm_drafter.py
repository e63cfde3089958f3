"""The EAGLE drafter of this project as a vLLM model.

vLLM's own EAGLE-1 class reads the hidden state after the policy's final norm and has no norm of its own; this drafter
reads it before that norm and predicts the next one there (models/drafter.py). So it goes the way of EAGLE-3: vLLM
hands over the output of the policy's last layer as the only auxiliary state, and what the model returns beside its
normed output is fed back. Embedding and LM head are the policy's modules, shared; `norm` has the policy's weight.
Shapes: N = tokens, C = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from tlt_pipeline.models.export_layout import D2T, T2D


class DrafterModel(nn.Module):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, vllm_config: VllmConfig, first_layer: int, prefix: str) -> None:
        super().__init__()
        assert vllm_config.speculative_config is not None
        config = vllm_config.speculative_config.draft_model_config.hf_config
        size = config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, prefix=maybe_prefix(prefix, "embed_tokens"))
        self.fc = ReplicatedLinear(
            2 * size,
            size,
            bias=False,
            params_dtype=vllm_config.model_config.dtype,
            prefix=maybe_prefix(prefix, "fc"),
            return_bias=False,
        )
        layer = LlamaDecoderLayer(vllm_config, prefix=maybe_prefix(prefix, f"layers.{first_layer}"), config=config)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.fc_input_size = size

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_NC: Tensor) -> tuple[Tensor, Tensor]:
        """-> (what the LM head reads, what the next draft step reads as hidden state), both [N, C]."""
        x_NC = self.fc(torch.cat([self.embed_tokens(input_ids), hidden_NC], -1))
        x_NC, residual_NC = self.layers[0](positions, x_NC, None)
        return self.norm(x_NC, residual_NC)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class TltDrafter(Eagle3LlamaForCausalLM):
    """Reads the names that `models/export.py` writes."""

    has_own_embed_tokens = False
    has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        assert vllm_config.speculative_config is not None
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        vocab = vllm_config.model_config.get_vocab_size()
        first_layer = vllm_config.model_config.get_total_num_hidden_layers()
        self.config.draft_vocab_size = vocab
        self.config.target_layer_count = first_layer
        self.model = DrafterModel(vllm_config, first_layer, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(vocab, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(vocab)
        self.draft_id_to_target_id = None
        self.proposes_V: Tensor | None = None
        self.use_parallel_drafting = False

    def embed_input_ids(self, input_ids: Tensor, *multimodal: object) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert inputs_embeds is None, "text only"
        return self.model(input_ids, positions, hidden_states)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """One auxiliary state is taken as it is."""
        return hidden_states

    def follow_policy(self, policy: nn.Module) -> None:
        """Takes the policy's norm; embedding and LM head are shared as modules."""
        self.model.norm.weight.data.copy_(policy.model.norm.weight.data)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Without what it shares with the policy, which a reload of the drafter must not touch."""
        embedding, head = self.model.embed_tokens, self.lm_head
        del self.model.embed_tokens, self.lm_head
        try:
            yield
        finally:
            self.model.embed_tokens, self.lm_head = embedding, head

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Without t2d in them, all tokens may be proposed."""
        stored = dict(weights)
        self.proposes_V = stored.pop(T2D, None)
        stored.pop(D2T, None)
        AutoWeightsLoader(self).load_weights(("model." + name, tensor) for name, tensor in stored.items())

    def compute_logits(self, hidden_NC: Tensor) -> Tensor:
        """Of tokens that the drafter was not trained to propose: minus infinity. The policy's head is shared whole, so
        a reduced draft vocabulary saves no time here."""
        logits_NV: Tensor = self.logits_processor(self.lm_head, hidden_NC)
        if self.proposes_V is None:
            return logits_NV
        return logits_NV.masked_fill_(~self.proposes_V.to(logits_NV.device), float("-inf"))
