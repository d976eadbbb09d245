"""Runs the experts of a transformers model (5 or newer) as two grouped products and one activation."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import aotmm


class Rows(torch.autograd.Function):
    """x[index], whose gradient gathers too: `back` has the places of x's rows in `index`."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.back, ctx.times = back, len(index) // max(1, len(x))
        return x[index]

    @staticmethod
    def backward(ctx, gradient):
        found = gradient[ctx.back]
        return (found if ctx.times == 1 else found.unflatten(0, (-1, ctx.times)).sum(1)), None, None


def experts(self, x, top_k_index, top_k_weights):
    """Compute what `self`, the experts of a layer, give for x (tokens, hidden) and the top k of each token."""
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    up, down = (w if self.is_transposed else w.mT for w in (self.gate_up_proj, self.down_proj))
    expert, order = top_k_index.flatten().sort()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    offs = torch.searchsorted(expert, torch.arange(self.num_experts, device=x.device), right=True, out_int32=True)
    y = aotmm.grouped_mm(Rows.apply(x, order // top_k_index.shape[1], place), up, offs=offs, bias=biases[0])
    y = aotmm.grouped_mm(self._apply_gate(y), down, offs=offs, bias=biases[1])
    y = Rows.apply(y, place, order).view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return y.sum(1).to(x.dtype)


ALL_EXPERTS_FUNCTIONS["aotmm"] = experts

if __name__ == "__main__":
    config = MixtralConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    model = MixtralForCausalLM(config).cuda().bfloat16()  # with random weights
    model.set_experts_implementation("aotmm")
    tokens = torch.arange(64, device="cuda")[None]
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    gradient = model.model.layers[0].mlp.experts.down_proj.grad
    print(f"loss {loss:.3f}, largest gradient {gradient.abs().max():.6f}")
