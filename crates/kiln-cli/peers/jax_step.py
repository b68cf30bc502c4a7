"""One training step in JAX, timed like `kiln bench`: loss, gradient and AdamW in one jitted function.

    jax_step.py [--mode jit] MODEL [--batch N] [--seq N] [--size N] [--steps N] [--infer]

Knows `mlp` and the Llama sizes, written with jax.numpy alone. Prints one JSON object whose fields are those of
`kiln bench --json`.
"""

import argparse
import json
import math
import resource
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp

# Width, layers, heads, key and value heads, inner width, tokens.
LLAMA = {
    "llama-tiny": (256, 4, 8, 8, 688, 4096),
    "llama-15m": (288, 6, 6, 6, 768, 32000),
    "llama-125m": (768, 12, 12, 12, 2048, 32000),
}
MLP = (784, 1024, 1024, 10)
RATE, BETA1, BETA2, EPSILON, DECAY = 1e-4, 0.9, 0.999, 1e-8, 0.01
WARMUP = 2


def dense(key, inputs, outputs):
    return jax.random.normal(key, (inputs, outputs), jnp.float32) / math.sqrt(inputs)


def cross_entropy(logits, targets):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)
    return -picked.mean()


def mlp_parameters(key):
    keys = jax.random.split(key, len(MLP))
    pairs = zip(keys, MLP, MLP[1:])
    return [(dense(key, inputs, outputs), jnp.zeros(outputs)) for key, inputs, outputs in pairs]


def mlp(parameters, hidden):
    for index, (weight, bias) in enumerate(parameters):
        if index > 0:
            hidden = jax.nn.gelu(hidden, approximate=False)
        hidden = hidden @ weight + bias
    return hidden


def llama_parameters(key, sizes):
    width, layers, heads, kv_heads, inner, tokens = sizes
    narrow = width // heads * kv_heads
    keys = iter(jax.random.split(key, 7 * layers + 2))
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
    return {"embedding": embedding, "blocks": blocks, "norm": jnp.ones(width), "head": dense(next(keys), width, tokens)}


def rms_norm(hidden, weight):
    return weight * hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-5)


def rotate(heads, cosine, sine):
    low, high = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate((low * cosine - high * sine, high * cosine + low * sine), axis=-1)


def llama(sizes, parameters, tokens):
    width, _, heads, kv_heads, _, _ = sizes
    batch, length = tokens.shape
    head_width = width // heads
    frequencies = 10000.0 ** -(jnp.arange(0, head_width, 2) / head_width)
    angles = jnp.outer(jnp.arange(length), frequencies)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    hidden_future = jnp.triu(jnp.full((length, length), -jnp.inf), 1)

    def split(hidden, weight, count):
        return (hidden @ weight).reshape(batch, length, count, head_width).transpose(0, 2, 1, 3)

    hidden = parameters["embedding"][tokens]
    for block in parameters["blocks"]:
        normed = rms_norm(hidden, block["attention_norm"])
        query = rotate(split(normed, block["query"], heads), cosine, sine)
        key = rotate(split(normed, block["key"], kv_heads), cosine, sine)
        value = split(normed, block["value"], kv_heads)
        key, value = (jnp.repeat(shared, heads // kv_heads, axis=1) for shared in (key, value))
        scores = query @ key.swapaxes(-1, -2) / math.sqrt(head_width) + hidden_future
        context = (jax.nn.softmax(scores) @ value).transpose(0, 2, 1, 3).reshape(batch, length, width)
        hidden = hidden + context @ block["output"]
        normed = rms_norm(hidden, block["inner_norm"])
        hidden = hidden + (jax.nn.silu(normed @ block["gate"]) * (normed @ block["up"])) @ block["down"]
    return rms_norm(hidden, parameters["norm"]) @ parameters["head"]


def adamw(parameters, gradients, state):
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, gradients)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g**2, second, gradients)

    def update(parameter, m, v):
        direction = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
        return parameter * (1 - RATE * DECAY) - RATE * direction

    return jax.tree.map(update, parameters, first, second), (count, first, second)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("mlp", *LLAMA))
    parser.add_argument("--mode", choices=("jit",), default="jit")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--infer", action="store_true")
    arguments = parser.parse_args()

    key = jax.random.key(0)
    if arguments.model == "mlp":
        parameters, forward = mlp_parameters(key), mlp
        inputs = jax.random.normal(key, (arguments.batch, MLP[0]))
        targets = jax.random.randint(key, (arguments.batch,), 0, MLP[-1])
    else:
        sizes = LLAMA[arguments.model]
        parameters, forward = llama_parameters(key, sizes), partial(llama, sizes)
        inputs = jax.random.randint(key, (arguments.batch, arguments.seq), 0, sizes[-1])
        targets = jax.random.randint(key, (arguments.batch * arguments.seq,), 0, sizes[-1])

    def loss(parameters):
        logits = forward(parameters, inputs)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(parameters, state):
        value, gradients = jax.value_and_grad(loss)(parameters)
        parameters, state = adamw(parameters, gradients, state)
        return parameters, state, value

    zeros = partial(jax.tree.map, jnp.zeros_like)
    state = (jnp.zeros(()), zeros(parameters), zeros(parameters))
    infer = jax.jit(lambda parameters: forward(parameters, inputs).mean())

    def step():
        nonlocal parameters, state
        if arguments.infer:
            return infer(parameters).block_until_ready()
        parameters, state, value = train(parameters, state)
        return value.block_until_ready()

    start = time.perf_counter()
    result = step()
    first = time.perf_counter() - start
    for _ in range(WARMUP):
        step()
    times = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        result = step()
        times.append(time.perf_counter() - start)
    print(
        json.dumps(
            {
                "peer": "jax-jit",
                "model": arguments.model,
                "batch": arguments.batch,
                "seq": arguments.seq,
                "dtype": "f32",
                "infer": arguments.infer,
                "median": statistics.median(times),
                "min": min(times),
                "first": first,
                "mem_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "loss": float(result),
            }
        )
    )


if __name__ == "__main__":
    main()
