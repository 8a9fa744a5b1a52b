"""What tests share with evaluate/test_scores.py."""

from __future__ import annotations

import torch

from rekindle.tasks import load_task
from rekindle.train.modelfolder import describe

SLICES = {"slices": ["topic"], "split": {"train": 0.4, "validation": 0.1, "test": 0.5}}


def model_of(task, spec, shards, folder, seed, change=lambda network: None):
    """An untrained model of some shards in `folder`."""
    loaded, manifest = load_task(task), shards.manifest
    torch.manual_seed(seed)
    network = loaded.build(spec, manifest.labels, manifest.settings, shards.assets)
    with torch.no_grad():
        change(network)
    folder.mkdir(parents=True, exist_ok=True)
    loaded.save(network, folder, manifest.labels, manifest.settings)
    describe(task, shards, folder, f"key{seed}")
    return folder


OWN = '''
import torch
from safetensors.torch import load_file, save_file
from rekindle.tasks.causal_lm import CausalLM

class Table(torch.nn.Module):
    """The next token from the last one alone; nothing of transformers."""
    def __init__(self, size):
        super().__init__()
        self.table = torch.nn.Embedding(size, size)
    def forward(self, ids):
        return self.table(ids)

class Bigrams(CausalLM):
    def build(self, model, labels, settings, assets):
        return Table(settings["vocab_size"])
    def weights(self, model):
        return None
    def logits(self, network, inputs):
        return network(inputs["input_ids"])
    def save(self, network, folder, labels, settings):
        save_file(network.state_dict(), folder / "model.safetensors")
    def load(self, folder):
        tensors = load_file(folder / "model.safetensors")
        network = Table(len(tensors["table.weight"]))
        network.load_state_dict(tensors)
        return network.eval()
    def generate(self, network, prompts, settings, assets, max_new_tokens):
        return [f"{type(network).__name__} after {prompt[-1][1]}" for prompt in prompts]
'''
