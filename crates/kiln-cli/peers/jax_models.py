"""The models of `kiln bench`, written with jax.numpy and jax.lax alone; images are channels last.

`subject` gives one by name: its parameters, its running statistics, inputs, targets, and a function

    forward(parameters, statistics, inputs, key) -> (logits, statistics)

where `key` draws what dropout leaves out; None stands for inference. With parameters of 16 bits the statistics of
norms and softmax are computed in f32, as PyTorch's autocast does; with f32 that changes nothing.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, NamedTuple, Optional

import jax
import jax.numpy as jnp

MLP = (784, 1024, 1024, 10)
# Width, layers, heads, key and value heads, inner width, tokens.
LLAMA = {
    "llama-tiny": (256, 4, 8, 8, 688, 4096),
    "llama-15m": (288, 6, 6, 6, 768, 32000),
    "llama-125m": (768, 12, 12, 12, 2048, 32000),
    "llama-1b": (2048, 16, 32, 8, 8192, 128256),
    "decoder-2l": (1024, 2, 8, 4, 32 * 1024, 3200),
}
# Width, layers, heads, inner width.
BERT = {"bert-minilm": (384, 6, 12, 1536), "bert-base": (768, 12, 12, 3072)}
VIT = {"vit_small": (384, 12, 6, 1536)}
BERT_TOKENS, BERT_POSITIONS, BERT_LABELS = 30522, 512, 2
PATCH, CLASSES = 16, 1000


@dataclass
class Subject:
    """A model and what it is trained on."""

    parameters: Any
    forward: Callable
    inputs: jax.Array
    targets: jax.Array
    statistics: Any = ()


def subject(name, batch, seq, size):
    """The model called `name`, with random parameters and inputs."""
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def labels(count, below):
        return jax.random.randint(next(keys), (count,), 0, below)

    def tokens(below):
        return jax.random.randint(next(keys), (batch, seq), 0, below)

    if name == "mlp":
        inputs = jax.random.normal(next(keys), (batch, MLP[0]))
        return Subject(mlp_parameters(keys), mlp, inputs, labels(batch, MLP[-1]))
    if name in LLAMA:
        sizes = LLAMA[name]
        return Subject(
            llama_parameters(keys, sizes), partial(llama, sizes), tokens(sizes[-1]), labels(batch * seq, sizes[-1])
        )
    if name in BERT:
        sizes = BERT[name]
        return Subject(
            bert_parameters(keys, sizes), partial(bert, sizes), tokens(BERT_TOKENS), labels(batch, BERT_LABELS)
        )
    images = jax.random.normal(next(keys), (batch, size, size, 3))
    if name in VIT:
        sizes = VIT[name]
        return Subject(vit_parameters(keys, sizes, size), partial(vit, sizes), images, labels(batch, CLASSES))
    network = NETWORKS[name]()
    parameters, statistics = network_parameters(keys, network)
    return Subject(parameters, partial(classify, network), images, labels(batch, CLASSES), statistics)


def dense(key, inputs, outputs):
    return jax.random.normal(key, (inputs, outputs)) / math.sqrt(inputs)


def linear_parameters(keys, inputs, outputs):
    return {"weight": dense(next(keys), inputs, outputs), "bias": jnp.zeros(outputs)}


def linear(layer, hidden):
    return hidden @ layer["weight"] + layer["bias"]


def norm_parameters(width):
    return {"weight": jnp.ones(width), "bias": jnp.zeros(width)}


def layer_norm(layer, hidden, epsilon):
    exact = hidden.astype(jnp.float32)
    centred = exact - exact.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + epsilon)).astype(hidden.dtype) * layer["weight"] + layer["bias"]


def dropout(hidden, rate, key):
    if key is None:
        return hidden
    keep = jax.random.bernoulli(key, 1 - rate, hidden.shape)
    return jnp.where(keep, hidden / (1 - rate), 0).astype(hidden.dtype)


def gelu(hidden):
    return jax.nn.gelu(hidden, approximate=False)


def split_heads(hidden, heads):
    batch, length, width = hidden.shape
    return hidden.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def attend(query, key, value, mask=None, drop=lambda weights: weights):
    """Attention of [batch, heads, length, width] to [batch, length, heads * width]."""
    scores = (query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])).astype(jnp.float32)
    weights = drop(jax.nn.softmax(scores if mask is None else scores + mask).astype(value.dtype))
    batch, heads, length, width = query.shape
    return (weights @ value).transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


# A perceptron.


def mlp_parameters(keys):
    return [linear_parameters(keys, inputs, outputs) for inputs, outputs in zip(MLP, MLP[1:])]


def mlp(parameters, statistics, hidden, key):
    for index, layer in enumerate(parameters):
        hidden = linear(layer, gelu(hidden) if index > 0 else hidden)
    return hidden, statistics


# Llama.


def llama_parameters(keys, sizes):
    width, layers, heads, kv_heads, inner, tokens = sizes
    narrow = width // heads * kv_heads
    shapes = {
        "query": (width, width), "key": (width, narrow), "value": (width, narrow), "output": (width, width),
        "gate": (width, inner), "up": (width, inner), "down": (inner, width),
    }  # fmt: skip
    blocks = [
        {name: dense(next(keys), *shape) for name, shape in shapes.items()}
        | {"attention_norm": jnp.ones(width), "inner_norm": jnp.ones(width)}
        for _ in range(layers)
    ]
    embedding = 0.02 * jax.random.normal(next(keys), (tokens, width))
    head = dense(next(keys), width, tokens)
    return {"embedding": embedding, "blocks": blocks, "norm": jnp.ones(width), "head": head}


def rms_norm(hidden, weight):
    exact = hidden.astype(jnp.float32)
    return weight * (exact * jax.lax.rsqrt(jnp.mean(exact**2, axis=-1, keepdims=True) + 1e-5)).astype(hidden.dtype)


def rotate(heads, cosine, sine):
    low, high = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate((low * cosine - high * sine, high * cosine + low * sine), axis=-1)


def llama(sizes, parameters, statistics, tokens, key):
    width, _, heads, kv_heads, _, _ = sizes
    length = tokens.shape[1]
    head_width = width // heads
    frequencies = 10000.0 ** -(jnp.arange(0, head_width, 2) / head_width)
    angles = jnp.outer(jnp.arange(length), frequencies)
    hidden = parameters["embedding"][tokens]
    rotation = jnp.cos(angles).astype(hidden.dtype), jnp.sin(angles).astype(hidden.dtype)
    hidden_future = jnp.triu(jnp.full((length, length), -jnp.inf), 1)

    for block in parameters["blocks"]:
        normed = rms_norm(hidden, block["attention_norm"])
        query = rotate(split_heads(normed @ block["query"], heads), *rotation)
        shared = rotate(split_heads(normed @ block["key"], kv_heads), *rotation)
        value = split_heads(normed @ block["value"], kv_heads)
        shared, value = (jnp.repeat(each, heads // kv_heads, axis=1) for each in (shared, value))
        hidden = hidden + attend(query, shared, value, hidden_future) @ block["output"]
        normed = rms_norm(hidden, block["inner_norm"])
        hidden = hidden + (jax.nn.silu(normed @ block["gate"]) * (normed @ block["up"])) @ block["down"]
    return rms_norm(hidden, parameters["norm"]) @ parameters["head"], statistics


# Encoders: BERT normalises after each residual, the vision transformer before each branch.


def encoder_parameters(keys, sizes):
    width, layers, _, inner = sizes
    shapes = {
        "query": (width, width), "key": (width, width), "value": (width, width), "output": (width, width),
        "up": (width, inner), "down": (inner, width),
    }  # fmt: skip
    return [
        {name: linear_parameters(keys, *shape) for name, shape in shapes.items()}
        | {"attention_norm": norm_parameters(width), "inner_norm": norm_parameters(width)}
        for _ in range(layers)
    ]


def self_attention(block, hidden, heads, drop=lambda weights: weights):
    query, key, value = (split_heads(linear(block[name], hidden), heads) for name in ("query", "key", "value"))
    return linear(block["output"], attend(query, key, value, drop=drop))


def feed_forward(block, hidden):
    return linear(block["down"], gelu(linear(block["up"], hidden)))


def bert_parameters(keys, sizes):
    width = sizes[0]

    def table(rows):
        return 0.02 * jax.random.normal(next(keys), (rows, width))

    return {
        "tokens": table(BERT_TOKENS),
        "positions": table(BERT_POSITIONS),
        "types": table(2),
        "norm": norm_parameters(width),
        "blocks": encoder_parameters(keys, sizes),
        "pooler": linear_parameters(keys, width, width),
        "head": linear_parameters(keys, width, BERT_LABELS),
    }


def bert(sizes, parameters, statistics, tokens, key):
    heads = sizes[2]
    draws = 3 * sizes[1] + 2
    keys = iter([None] * draws if key is None else jax.random.split(key, draws))

    def drop(hidden):
        return dropout(hidden, 0.1, next(keys))

    embedded = parameters["tokens"][tokens] + parameters["positions"][: tokens.shape[1]] + parameters["types"][0]
    hidden = drop(layer_norm(parameters["norm"], embedded, 1e-12))
    for block in parameters["blocks"]:
        attended = drop(self_attention(block, hidden, heads, drop))
        hidden = layer_norm(block["attention_norm"], hidden + attended, 1e-12)
        hidden = layer_norm(block["inner_norm"], hidden + drop(feed_forward(block, hidden)), 1e-12)
    pooled = jnp.tanh(linear(parameters["pooler"], hidden[:, 0]))
    return linear(parameters["head"], drop(pooled)), statistics


def vit_parameters(keys, sizes, size):
    width = sizes[0]
    patches = (size // PATCH) ** 2
    return {
        "patches": linear_parameters(keys, 3 * PATCH * PATCH, width),
        "class": jnp.zeros((1, 1, width)),
        "positions": 0.02 * jax.random.normal(next(keys), (1, patches + 1, width)),
        "blocks": encoder_parameters(keys, sizes),
        "norm": norm_parameters(width),
        "head": linear_parameters(keys, width, CLASSES),
    }


def vit(sizes, parameters, statistics, images, key):
    batch, size = images.shape[:2]
    grid = size // PATCH
    patches = images.reshape(batch, grid, PATCH, grid, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    hidden = linear(parameters["patches"], patches.reshape(batch, grid * grid, -1))
    first = jnp.broadcast_to(parameters["class"], (batch, 1, hidden.shape[-1]))
    hidden = jnp.concatenate((first, hidden), axis=1) + parameters["positions"]
    for block in parameters["blocks"]:
        hidden = hidden + self_attention(block, layer_norm(block["attention_norm"], hidden, 1e-6), sizes[2])
        hidden = hidden + feed_forward(block, layer_norm(block["inner_norm"], hidden, 1e-6))
    return linear(parameters["head"], layer_norm(parameters["norm"], hidden, 1e-6)[:, 0]), statistics


# Convolutional networks: blocks of convolutions with batch norm.


def relu6(hidden):
    return jnp.clip(hidden, 0, 6)


class Convolution(NamedTuple):
    """A convolution without bias, batch norm, and an activation."""

    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    activation: Optional[Callable] = None


class Block(NamedTuple):
    """Convolutions one after the other; with a residual that is what came in, or a convolution of it."""

    layers: list
    residual: Any = None
    activation: Optional[Callable] = None


SAME = "same"


class Network(NamedTuple):
    blocks: list
    width: int
    dropout: float = 0.0
    # Whether the largest of 3x3 pixels is taken after the first block.
    pooled: bool = False


def resnet(repeats, expansion, groups=1, group_width=64):
    relu = jax.nn.relu
    blocks, inputs = [Block([Convolution(3, 64, 7, 2, activation=relu)])], 64
    for stage, repeat in enumerate(repeats):
        for index in range(repeat):
            stride = 2 if stage > 0 and index == 0 else 1
            width = groups * group_width << stage
            outputs = (64 << stage) * expansion
            if expansion == 1:
                layers = [Convolution(inputs, width, 3, stride, activation=relu), Convolution(width, width, 3)]
            else:
                layers = [
                    Convolution(inputs, width, activation=relu),
                    Convolution(width, width, 3, stride, groups, relu),
                    Convolution(width, outputs),
                ]
            same = stride == 1 and inputs == outputs
            blocks.append(Block(layers, SAME if same else Convolution(inputs, outputs, 1, stride), relu))
            inputs = outputs
    return Network(blocks, inputs, pooled=True)


def mobilenet_v2():
    blocks, inputs = [Block([Convolution(3, 32, 3, 2, activation=relu6)])], 32
    stages = [
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ]  # fmt: skip
    for expansion, outputs, repeat, first_stride in stages:
        for index in range(repeat):
            stride = first_stride if index == 0 else 1
            inner = inputs * expansion
            layers = [Convolution(inputs, inner, activation=relu6)] if expansion > 1 else []
            layers += [Convolution(inner, inner, 3, stride, inner, relu6), Convolution(inner, outputs)]
            blocks.append(Block(layers, SAME if stride == 1 and inputs == outputs else None))
            inputs = outputs
    blocks.append(Block([Convolution(inputs, 1280, activation=relu6)]))
    return Network(blocks, 1280, dropout=0.2)


NETWORKS = {
    "resnet18": partial(resnet, (2, 2, 2, 2), 1),
    "resnet50": partial(resnet, (3, 4, 6, 3), 4),
    "resnext50_32x4d": partial(resnet, (3, 4, 6, 3), 4, 32, 4),
    "resnext101_32x8d": partial(resnet, (3, 4, 23, 3), 4, 32, 8),
    "mobilenet_v2": mobilenet_v2,
}


def network_parameters(keys, network):
    def convolution(layer):
        shape = (layer.kernel, layer.kernel, layer.inputs // layer.groups, layer.outputs)
        weight = jax.random.normal(next(keys), shape) * math.sqrt(2 / math.prod(shape[:3]))
        return {"weight": weight, "norm": norm_parameters(layer.outputs)}

    def statistics(layer):
        return {"mean": jnp.zeros(layer.outputs), "variance": jnp.ones(layer.outputs)}

    layers = [layers_of(block) for block in network.blocks]
    parameters = {
        "blocks": [[convolution(layer) for layer in block] for block in layers],
        "head": linear_parameters(keys, network.width, CLASSES),
    }
    return parameters, [[statistics(layer) for layer in block] for block in layers]


def layers_of(block):
    """The convolutions of a block, that of its residual last."""
    return block.layers + ([block.residual] if isinstance(block.residual, Convolution) else [])


def convolve(layer, parameters, statistics, hidden, training):
    padding = [(layer.kernel // 2,) * 2] * 2
    hidden = jax.lax.conv_general_dilated(
        hidden,
        parameters["weight"],
        (layer.stride,) * 2,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=layer.groups,
    )
    mean, variance = statistics["mean"], statistics["variance"]
    exact = hidden.astype(jnp.float32)
    if training:
        mean, variance = exact.mean(axis=(0, 1, 2)), exact.var(axis=(0, 1, 2))
        now = {"mean": mean, "variance": variance}
        statistics = {name: 0.9 * statistics[name] + 0.1 * now[name] for name in now}
    norm = parameters["norm"]
    exact = (exact - mean) * (jax.lax.rsqrt(variance + 1e-5) * norm["weight"]) + norm["bias"]
    hidden = exact.astype(hidden.dtype)
    return (layer.activation(hidden) if layer.activation else hidden), statistics


def classify(network, parameters, statistics, hidden, key):
    updated = []
    for index, block in enumerate(network.blocks):
        entered, after = hidden, []
        states = zip(layers_of(block), parameters["blocks"][index], statistics[index])
        for layer, weights, running in states:
            if layer is block.residual:
                entered, running = convolve(layer, weights, running, entered, key is not None)
            else:
                hidden, running = convolve(layer, weights, running, hidden, key is not None)
            after.append(running)
        updated.append(after)
        if block.residual:
            hidden = hidden + entered
        if block.activation:
            hidden = block.activation(hidden)
        if network.pooled and index == 0:
            padding = ((0, 0), (1, 1), (1, 1), (0, 0))
            hidden = jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    hidden = dropout(hidden.mean(axis=(1, 2)), network.dropout, key if network.dropout > 0 else None)
    return linear(parameters["head"], hidden), updated


NAMES = ("mlp", *LLAMA, *BERT, *VIT, *NETWORKS)
