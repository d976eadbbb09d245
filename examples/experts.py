"""Runs the experts of a transformers model (5 or newer) as two grouped products and one activation."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import aotmm


def experts(self, x, top_k_index, top_k_weights):
    """Compute what `self`, the experts of a layer, give for x (tokens, hidden) and the top k of each token."""
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    up, down = (w if self.is_transposed else w.mT for w in (self.gate_up_proj, self.down_proj))
    expert, order = top_k_index.flatten().sort()
    offs = torch.searchsorted(expert, torch.arange(self.num_experts, device=x.device), right=True, out_int32=True)
    y = aotmm.grouped_mm(x[order // top_k_index.shape[1]], up, offs=offs, bias=biases[0])
    y = aotmm.grouped_mm(self._apply_gate(y), down, offs=offs, bias=biases[1])
    y = y * top_k_weights.flatten()[order, None]
    return y[order.argsort()].view(*top_k_index.shape, -1).sum(1).to(x.dtype)


ALL_EXPERTS_FUNCTIONS["aotmm"] = experts

config = MixtralConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
model = MixtralForCausalLM(config).cuda().bfloat16()  # with random weights
model.set_experts_implementation("aotmm")
tokens = torch.arange(64, device="cuda")[None]
loss = model(tokens, labels=tokens).loss
loss.backward()

print(f"loss {loss:.3f}, largest gradient {model.model.layers[0].mlp.experts.down_proj.grad.abs().max():.6f}")
