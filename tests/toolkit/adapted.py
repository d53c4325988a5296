"""A model with adapters, in the way of PEFT: Python attributes of wrapped layers say which of them are at work."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn


class AdaptedLinear(nn.Module):
    """A linear layer plus those low-rank products that are active."""

    def __init__(self, base_layer, names):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({name: nn.Linear(base_layer.in_features, 2, bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, base_layer.out_features, bias=False) for name in names})
        self.scaling = dict.fromkeys(names, 3.0)
        self.merged_adapters, self.active_adapters, self.disable_adapters = [], [names[0]], False

    def forward(self, x):
        result = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            result = result + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return result


class Adapted(nn.Module):
    """A causal language model whose `up_proj` layers have adapters a and b; everything else is the model's own."""

    def __init__(self, model, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base_model = model
        for layer in model.model.layers:
            layer.mlp.up_proj = AdaptedLinear(layer.mlp.up_proj, ["a", "b"])
        self.requires_grad_(False).eval()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)

    def get_base_model(self):
        return self.base_model

    def layers(self):
        return [module for module in self.modules() if isinstance(module, AdaptedLinear)]

    def set_adapter(self, name):
        for layer in self.layers():
            layer.active_adapters = [name]

    @contextmanager
    def disable_adapter(self):
        for layer in self.layers():
            layer.disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers():
                layer.disable_adapters = False
