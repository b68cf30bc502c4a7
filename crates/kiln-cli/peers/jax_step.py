"""One training step in JAX, timed like `kiln bench`: loss, gradient and AdamW in one jitted function.

    jax_step.py [--mode jit] MODEL [--batch N] [--seq N] [--size N] [--steps N] [--infer] [--device cpu|cuda] [--tf32] [--autocast bf16|f16]

With `--autocast` the model computes with parameters and images rounded to 16 bits; gradients, loss and optimizer are f32. On a GPU products and convolutions of
f32 may use TF32 with `--tf32` alone. Prints one JSON object whose fields are those of `kiln bench --json`.
"""

import argparse
import json
import resource
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax_models import NAMES, subject

RATE, BETA1, BETA2, EPSILON, DECAY = 1e-4, 0.9, 0.999, 1e-8, 0.01
WARMUP = 2


def cross_entropy(logits, targets):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), targets[:, None], axis=1)
    return -picked.mean()


def adamw(parameters, gradients, state):
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, gradients)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g**2, second, gradients)

    def update(parameter, m, v):
        direction = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
        return parameter * (1 - RATE * DECAY) - RATE * direction

    return jax.tree.map(update, parameters, first, second), (count, first, second)


def device_memory():
    """The most memory of the GPU that was held at once in MiB; None on the CPU."""
    held = jax.local_devices()[0].memory_stats()
    return held["peak_bytes_in_use"] // 2**20 if held else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("--mode", choices=("jit",), default="jit")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--infer", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--autocast", choices=("bf16", "f16"))
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", arguments.device)
    # By itself JAX lets products of f32 use TF32 on a GPU. Those of 16 bits have no such choice.
    if arguments.device == "cuda" and arguments.autocast is None and not arguments.tf32:
        jax.config.update("jax_default_matmul_precision", "float32")
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16, None: jnp.float32}[arguments.autocast]

    def rounded(values):
        return jax.tree.map(lambda value: value.astype(dtype) if value.dtype == jnp.float32 else value, values)

    model = subject(arguments.model, arguments.batch, arguments.seq, arguments.size)

    def loss(parameters, running, key, inputs, targets):
        logits, running = model.forward(rounded(parameters), running, rounded(inputs), key)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets), running

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(parameters, running, state, key, inputs, targets):
        key, draw = jax.random.split(key)
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, running), gradients = gradient(parameters, running, draw, inputs, targets)
        parameters, state = adamw(parameters, gradients, state)
        return parameters, running, state, key, value

    zeros = partial(jax.tree.map, jnp.zeros_like)
    parameters, running, key = model.parameters, model.statistics, jax.random.key(1)
    state = (jnp.zeros(()), zeros(parameters), zeros(parameters))

    @jax.jit
    def infer(parameters, running, inputs):
        return model.forward(rounded(parameters), running, rounded(inputs), None)[0].astype(jnp.float32).mean()

    def step():
        nonlocal parameters, running, state, key
        if arguments.infer:
            return infer(parameters, running, model.inputs).block_until_ready()
        batch = model.inputs, model.targets
        parameters, running, state, key, value = train(parameters, running, state, key, *batch)
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
                "device_mb": device_memory(),
                "mem_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "loss": float(result),
            }
        )
    )


if __name__ == "__main__":
    main()
