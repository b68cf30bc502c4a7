"""What PyTorch's torch.func makes of small networks, as JSON: the oracle of `tests/func/torch.rs`.

    torch_func.py --count N --seed N > torch.json

Draws N configurations of a network and a loss, and prints each with its results in f64: the gradient of
each sample's loss (`vmap(grad(loss))`), the Jacobian of the outputs by input and biases, the Hessian of the
loss by input and last matrix, and products with the Jacobian from both sides (`jvp`, `vjp`), and a Hessian times
a vector (`jvp(grad(loss))`). Numbers are rounded to 13 digits. Needs torch.

Every tensor is made of sin(seed + 1.7 i) for its elements i, so that the configuration says all of it.
"""

import argparse
import json
import math
import random

import torch
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

ACTIVATIONS = ["tanh", "sigmoid", "gelu", "silu", "softplus", "sin", "relu"]
MIXERS = ["none", "attention", "convolution", "running_sum"]
LOSSES = ["squares", "soft_labels", "label", "huber"]


def draw(generator):
    """A configuration."""
    return {
        "inputs": generator.randint(2, 4),
        "hidden": 2 * generator.randint(1, 3),
        "layers": generator.randint(1, 2),
        "outputs": generator.randint(2, 3),
        "batch": generator.randint(1, 4),
        "activation": generator.choice(ACTIVATIONS),
        "mixer": generator.choice(MIXERS),
        "norm": generator.random() < 0.4,
        "residual": generator.random() < 0.4,
        "loss": generator.choice(LOSSES),
        "seed": round(generator.uniform(0.0, 100.0), 3),
    }


def numbers(shape, seed):
    count = math.prod(shape)
    values = [math.sin(seed + 1.7 * i) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def parameters(config, seed):
    """Matrices and vectors, in the order in which results list them."""
    widths = [config["inputs"]] + [config["hidden"]] * config["layers"] + [config["outputs"]]
    matrices = [numbers(pair, seed + 0.1 * at) for at, pair in enumerate(zip(widths, widths[1:]))]
    vectors = [numbers([width], seed + 0.05 + 0.1 * at) for at, width in enumerate(widths[1:])]
    return matrices, vectors


def network(config, values, x):
    matrices, vectors = values
    hidden = x
    for matrix, vector in zip(matrices[:-1], vectors[:-1]):
        before, hidden = hidden, hidden @ matrix + vector
        if config["norm"]:
            centred = hidden - hidden.mean()
            hidden = centred / (centred.square().mean() + 0.1).sqrt()
        name = config["activation"]
        hidden = torch.sin(hidden) if name == "sin" else getattr(F, name)(hidden)
        if config["mixer"] == "attention":
            tokens = hidden.reshape(2, -1)
            scores = tokens @ tokens.T / math.sqrt(tokens.shape[1])
            hidden = (torch.softmax(scores, 1) @ tokens).reshape(-1)
        elif config["mixer"] == "convolution":
            kernel = torch.tensor([[[0.5, -0.25, 0.75]]], dtype=torch.float64)
            hidden = F.conv1d(hidden.reshape(1, 1, -1), kernel, padding=1).reshape(-1)
        elif config["mixer"] == "running_sum":
            hidden = torch.cumsum(hidden, 0)
        if config["residual"] and before.shape == hidden.shape:
            hidden = hidden + before
    return hidden @ matrices[-1] + vectors[-1]


def loss(config, values, x, y, label):
    out = network(config, values, x)
    if config["loss"] == "squares":
        return (out - y).square().sum()
    if config["loss"] == "soft_labels":
        return -(torch.softmax(y, 0) * torch.log_softmax(out, 0)).sum()
    if config["loss"] == "label":
        return -torch.log_softmax(out, 0).gather(0, label).sum()
    away = (out - y).abs()
    return torch.where(away < 0.5, away.square(), away - 0.25).sum()


def flat(*structures):
    """All numbers of nested tuples and lists of tensors, in order."""
    found = []
    for structure in structures:
        if torch.is_tensor(structure):
            found += [float(f"{value:.13g}") for value in structure.reshape(-1).tolist()]
        else:
            found += flat(*structure)
    return found


def results(config):
    seed = config["seed"]
    values, tangents = parameters(config, seed), parameters(config, seed + 7.0)
    xs = numbers([config["batch"], config["inputs"]], seed + 1.0)
    ys = numbers([config["batch"], config["outputs"]], seed + 2.0)
    labels = torch.tensor([[(7 * at + 3) % config["outputs"]] for at in range(config["batch"])])
    x, y, label = xs[0], ys[0], labels[0]
    of_loss = lambda values, x, y, label: loss(config, values, x, y, label)
    of_network = lambda values: network(config, values, x)
    of_input = lambda x, vectors: network(config, (values[0], vectors), x)
    last = lambda x, matrix: loss(config, ([*values[0][:-1], matrix], values[1]), x, y, label)
    value, pull = vjp(of_network, values)
    (pulled,) = pull(numbers([config["outputs"]], seed + 3.0))
    _, pushed = jvp(of_network, (values,), (tangents,))
    _, product = jvp(grad(lambda values: of_loss(values, x, y, label)), (values,), (tangents,))
    by_input, by_vectors = jacrev(of_input, (0, 1))(x, values[1])
    second = hessian(last, (0, 1))(x, values[0][-1])
    return {
        "value": flat(value),
        "each_gradient": flat(vmap(grad(of_loss), (None, 0, 0, 0))(values, xs, ys, labels)),
        "jacobian": flat(by_input, by_vectors),
        "hessian": flat(second),
        "jvp": flat(pushed),
        "vjp": flat(pulled),
        "hessian_product": flat(product),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    lines = []
    for _ in range(arguments.count):
        config = draw(generator)
        lines.append(json.dumps({"config": config, "results": results(config)}))
    print("[\n" + ",\n".join(lines) + "\n]")


main()
