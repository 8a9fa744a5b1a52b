"""A Llama in the tensor parallelism of megatron-core: two epochs on rekindle's shards, all ranks
one group. Saved every 20 steps and on SIGTERM, resumed where it was, on any number of ranks that
divides the heads; exported under Hugging Face's names. What is kept are whole matrices, cut again
at a start: weights and both moments of AdamW.

megatron-core is made for GPUs; without one, `on_cpu` puts three of its calls out of the way."""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from rekindle.data.manifest import open_shards
from rekindle.spec.model import ModelSpec
from rekindle.tasks import load_task

EPOCHS, BATCH, EVERY = 2, 8, 20


def on_cpu():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    draws = SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER = draws
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def megatron(config):
    """The model of a Llama's configuration, this rank's part of it, with all fusions off."""
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=WORLD,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(
        settings,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )


def names(layers):
    """Megatron's name of each weight, Hugging Face's names of what it consists of, and the
    dimension in which it is cut, or None where each rank has all of it."""
    yield "embedding.word_embeddings.weight", ["model.embed_tokens.weight"], 0
    for i in range(layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        for of, part in (("input", "input"), ("pre_mlp", "post_attention")):
            yield f"{ours}{of}_layernorm.weight", [f"{theirs}{part}_layernorm.weight"], None
        qkv = [f"{theirs}self_attn.{part}_proj.weight" for part in "qkv"]
        yield f"{ours}self_attention.linear_qkv.weight", qkv, 0
        yield f"{ours}self_attention.linear_proj.weight", [f"{theirs}self_attn.o_proj.weight"], 1
        gated = [f"{theirs}mlp.{part}_proj.weight" for part in ("gate", "up")]
        yield f"{ours}mlp.linear_fc1.weight", gated, 0
        yield f"{ours}mlp.linear_fc2.weight", [f"{theirs}mlp.down_proj.weight"], 1
    yield "decoder.final_layernorm.weight", ["model.norm.weight"], None
    yield "output_layer.weight", ["lm_head.weight"], 0


def cut(whole, dim):
    """This rank's share of matrices that Megatron keeps in one. Those of attention take turns, the
    queries of a group before its key and value; a share of theirs is a share of the groups."""
    if dim is None:
        return whole[0]
    shares = [matrix.chunk(WORLD, dim)[RANK] for matrix in whole]
    if len(whole) == 3:
        shares = [share.unflatten(0, (GROUPS // WORLD, -1)) for share in shares]
        return torch.cat(shares, 1).flatten(0, 1)
    return torch.cat(shares, dim)


def joined(share, dim, like):
    """The whole matrices of all ranks' shares; `like`: tensors of their shapes."""
    if dim is None:
        return [share.clone()]
    shares = [torch.empty_like(share) for _ in range(WORLD)]
    dist.all_gather(shares, share.contiguous())
    if len(like) == 3:
        shares = [share.unflatten(0, (GROUPS // WORLD, -1)) for share in shares]
        rows = [len(matrix) // GROUPS for matrix in like]
        parts = torch.cat(shares).split(rows, 1)
        return [part.flatten(0, 1).contiguous() for part in parts]
    rows = [matrix.shape[dim] // WORLD for matrix in like]
    parts = zip(*(share.split(rows, dim) for share in shares), strict=True)
    return [torch.cat(part, dim) for part in parts]


job = json.loads(Path(os.environ["REKINDLE_JOB"]).read_text())
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
saved = Path(job["checkpoints"]) / "megatron"
seed = job["train"]["seed"]

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:
    on_cpu()
device = torch.device("cuda" if gpu else "cpu")
dist.init_process_group("nccl" if gpu else "gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
if gpu:
    tensor_parallel.model_parallel_cuda_manual_seed(seed)

shards, task = open_shards(job["shards"]), load_task(job["task"])
settings, table = shards.manifest.settings, shards.table("train")
torch.manual_seed(seed)  # the same start on any number of ranks
network = task.build(ModelSpec(**job["model"]), shards.manifest.labels, settings, shards.assets)
config, whole = network.config, dict(network.named_parameters())
held = {part for _, parts, _ in names(config.num_hidden_layers) for part in parts}
ropes = getattr(config, "rope_parameters", None) or {}
alike = getattr(config, "hidden_act", ""), ropes.get("rope_type"), held == set(whole)
if alike != ("silu", "default", True) or config.model_type != "llama":
    sys.exit("this script trains a Llama with plain RoPE and untied embeddings only")
if config.head_dim * config.num_attention_heads != config.hidden_size or job["init"]:
    sys.exit("this script takes no model.init_from, and no heads of another size than their share")
GROUPS = config.num_key_value_heads
for what, size in (("key and value heads", GROUPS), ("tokens", config.vocab_size)):
    if size % WORLD:
        sys.exit(f"{size} {what} do not divide among {WORLD} ranks")

model = megatron(config).to(device)
weights = dict(model.named_parameters())
optimizer = torch.optim.AdamW(weights.values(), lr=job["train"]["lr"])
KINDS = ("weights", "exp_avg", "exp_avg_sq")


def load(kept, kind):
    """Each rank's share, from whole matrices, of weights or of a moment."""
    for name, parts, dim in names(config.num_hidden_layers):
        share = cut([kept[part].detach() for part in parts], dim).to(device)
        if kind == "weights":
            weights[name].data.copy_(share)
        else:
            optimizer.state[weights[name]][kind] = share.clone()


def gathered(kind):
    """Whole matrices by Hugging Face's names; all ranks take part."""
    found = {}
    for name, parts, dim in names(config.num_hidden_layers):
        weight = weights[name]
        share = weight.data if kind == "weights" else optimizer.state[weight][kind]
        like = [whole[part] for part in parts]
        found |= zip(parts, (one.cpu() for one in joined(share, dim, like)), strict=True)
    return found


def save(step):
    """A file a step; `step.json` names the newest one that is complete."""
    state = {kind: gathered(kind) for kind in KINDS}
    if RANK:
        return
    saved.mkdir(parents=True, exist_ok=True)
    torch.save(state, saved / f"step-{step}.pt")
    draft = saved / "step.json.draft"
    draft.write_text(json.dumps(step))
    draft.replace(saved / "step.json")


done = json.loads((saved / "step.json").read_text()) if (saved / "step.json").exists() else 0
dist.barrier()  # before one of them saves again
if done:
    kept = torch.load(saved / f"step-{done}.pt")
    for kind in KINDS:
        load(kept[kind], kind)
    for weight in weights.values():
        optimizer.state[weight]["step"] = torch.tensor(float(done))
else:
    load(whole, "weights")

print(f"megatron-core on {WORLD} ranks", flush=True)
a_epoch = table.num_rows // BATCH
for step in range(done + 1, EPOCHS * a_epoch + 1):
    epoch, turn = divmod(step - 1, a_epoch)
    chance = torch.Generator().manual_seed(seed * 1000 + epoch)
    order = torch.randperm(table.num_rows, generator=chance)
    rows = order[turn * BATCH : (turn + 1) * BATCH]
    given = task.collate(table.take(rows.numpy()), settings)
    inputs, positions, labels = (
        given[name].to(device) for name in ("input_ids", "position_ids", "labels")
    )
    length = inputs.shape[1]
    later = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    counts = labels >= 0
    losses = model(inputs, positions, later, labels=labels.clamp(min=0))
    loss = (losses * counts).sum() / counts.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    asked = torch.tensor(float(stop.is_set()), device=device)
    dist.all_reduce(asked)
    if RANK == 0:
        event = {"event": "progress", "step": step, "steps": EPOCHS * a_epoch, "loss": loss.item()}
        print("::rekindle", json.dumps(event), flush=True)
    if asked or step % EVERY == 0:
        save(step)
    if asked:
        dist.barrier()
        sys.exit(1)

trained = gathered("weights")
if RANK == 0:
    network.load_state_dict(trained, strict=True)
    task.save(network, Path(job["output"]), shards.manifest.labels, settings)
dist.barrier()
dist.destroy_process_group()
