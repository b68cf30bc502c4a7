"""One training step in PyTorch, timed like `kiln bench`.

    torch_step.py [--mode eager|compile|overhead] MODEL [--batch N] [--seq N] [--size N] [--steps N] [--infer] [--device cpu|cuda] [--tf32] [--autocast bf16|f16]

The models are those of `kiln bench` with the same sizes; image classifiers need torchvision (and timm for `vit_small`), BERT needs
transformers. With `--tf32` products and convolutions on a GPU may use TF32, as `kiln bench --tf32` lets them; `overhead` is torch.compile with CUDA graphs. `--autocast` is
torch.autocast around the forward pass. Under torchrun the ranks train together with DistributedDataParallel, each on --batch examples, and rank 0
prints. Prints one JSON object whose fields are those of `kiln bench --json`.
"""

import argparse
import json
import os
import resource
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

# Width, layers, heads, key and value heads, inner width, tokens.
LLAMA = {
    "llama-tiny": (256, 4, 8, 8, 688, 4096),
    "llama-15m": (288, 6, 6, 6, 768, 32000),
    "llama-125m": (768, 12, 12, 12, 2048, 32000),
    "llama-1b": (2048, 16, 32, 8, 8192, 128256),
    "decoder-2l": (1024, 2, 8, 4, 32 * 1024, 3200),
}
BERT = {
    "bert-base": {},
    "bert-minilm": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
}
WARMUP = 2


class Norm(nn.Module):
    """The root mean square norm in f32, whatever autocast made of its input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden):
        exact = hidden.float()
        return self.weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5))


class Attention(nn.Module):
    """Causal attention with rotary positions and shared key and value heads."""

    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden, rotation):
        batch, length, width = hidden.shape

        def split(projection, heads):
            return projection(hidden).view(batch, length, heads, self.head_width).transpose(1, 2)

        query = rotate(split(self.query, self.heads), rotation)
        key = rotate(split(self.key, self.kv_heads), rotation)
        value = split(self.value, self.kv_heads)
        shared = self.heads // self.kv_heads
        if shared > 1:
            key = key.repeat_interleave(shared, dim=1)
            value = value.repeat_interleave(shared, dim=1)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(context.transpose(1, 2).reshape(batch, length, width))


def rotate(heads, rotation):
    cosine, sine = rotation
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


class Layer(nn.Module):
    """Attention and a gated feed-forward network, each after an RMS norm and around a residual."""

    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.attention_norm = Norm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.inner_norm = Norm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden, rotation):
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        normed = self.inner_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, width, layers, heads, kv_heads, inner, tokens):
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens):
        half = torch.arange(0, self.head_width, 2, device=tokens.device).float() / self.head_width
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device).float(), 10000.0**-half)
        rotation = angles.cos(), angles.sin()
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return self.head(self.norm(hidden))


def subject(arguments):
    """Model, input and loss of the output."""
    name, batch, seq = arguments.model, arguments.batch, arguments.seq
    if name == "mlp":
        model = nn.Sequential(
            nn.Linear(784, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
        )
        labels = torch.randint(0, 10, (batch,))
        return model, torch.randn(batch, 784), lambda output: F.cross_entropy(output, labels)
    if name in LLAMA:
        tokens = LLAMA[name][-1]
        targets = torch.randint(0, tokens, (batch * seq,))
        inputs = torch.randint(0, tokens, (batch, seq))
        return Llama(*LLAMA[name]), inputs, lambda output: F.cross_entropy(output.flatten(0, 1), targets)
    if name in BERT:
        from transformers import BertConfig, BertForSequenceClassification

        model = BertForSequenceClassification(BertConfig(num_labels=2, **BERT[name]))
        labels = torch.randint(0, 2, (batch,))
        return model, torch.randint(0, 30000, (batch, seq)), lambda output: F.cross_entropy(output.logits, labels)
    if name in ("vit", "vit_small"):
        import timm

        model = timm.create_model("vit_small_patch16_224", img_size=arguments.size)
    else:
        import torchvision

        model = torchvision.models.get_model(name, weights=None)
    labels = torch.randint(0, 1000, (batch,))
    images = torch.randn(batch, 3, arguments.size, arguments.size)
    return model, images, lambda output: F.cross_entropy(output, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--mode", choices=("eager", "compile", "overhead"), default="eager")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--infer", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--autocast", choices=("bf16", "f16"))
    arguments = parser.parse_args()

    torch.manual_seed(0)
    on_gpu = arguments.device == "cuda"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
        torch.backends.cudnn.allow_tf32 = arguments.tf32
        torch.backends.cudnn.benchmark = True
    # Compiled code would make its tensors on the CPU, which a default device that stays does not change.
    with torch.device(arguments.device):
        model, inputs, loss_of = subject(arguments)
    if on_gpu and inputs.dim() == 4:
        model = model.to(memory_format=torch.channels_last)
        inputs = inputs.to(memory_format=torch.channels_last)
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = torch.autocast(
        arguments.device,
        dtype=torch.float16 if arguments.autocast == "f16" else torch.bfloat16,
        enabled=arguments.autocast is not None,
    )

    def compiled(function):
        if arguments.mode == "eager":
            return function
        return torch.compile(function, mode="reduce-overhead" if arguments.mode == "overhead" else None)

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    if arguments.infer:
        model.eval()
        forward = compiled(model)

        def step():
            with torch.no_grad(), autocast:
                output = forward(inputs)
            return getattr(output, "logits", output)

    else:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)

        def forward():
            with autocast:
                return loss_of(model(inputs))

        forward = compiled(forward)

        def step():
            loss = forward()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            return loss.detach()

    start = time.perf_counter()
    result = step()
    wait()
    first = time.perf_counter() - start
    for _ in range(WARMUP):
        step()
    wait()
    times = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        result = step()
        wait()
        times.append(time.perf_counter() - start)
    if ranks > 1 and torch.distributed.get_rank() > 0:
        torch.distributed.destroy_process_group()
        return
    print(
        json.dumps(
            {
                "peer": f"torch-{arguments.mode}",
                "model": arguments.model,
                "batch": arguments.batch,
                "seq": arguments.seq,
                "dtype": "f32",
                "infer": arguments.infer,
                "median": statistics.median(times),
                "min": min(times),
                "first": first,
                "device_mb": torch.cuda.max_memory_allocated() // 2**20 if on_gpu else None,
                "mem_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "loss": float(result.mean()),
            }
        )
    )


if __name__ == "__main__":
    main()
