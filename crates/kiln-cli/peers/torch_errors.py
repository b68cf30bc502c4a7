"""How far one training step is from the same step in f64: Kiln's beside PyTorch's.

    torch_errors.py write MODEL --folder DIR [--batch N] [--size N] [--seed N]
    torch_errors.py compare MODEL --folder DIR [--verbose]

`write` puts random weights of a model of torchvision and a batch into the folder; `cargo run --example gradients -- MODEL DIR`
computes Kiln's step from them; `compare` computes the step in PyTorch in f64, in f32 and in f32 with channels-last images, and
prints for logits, loss, running statistics and gradients the relative error of each by norms, in units of 2^-24
(the geometric mean over all tensors of a kind), and Kiln's error over PyTorch's, tensor by tensor: median, ninth decile and
largest. Running statistics start from zero, so that they are those of the batch times a momentum. Needs torch,
torchvision and safetensors.
"""

import argparse
import copy
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

UNIT = 2.0**-24


def build(name):
    """The model without dropout, in training mode."""
    model = torchvision.models.get_model(name, weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def write(arguments):
    torch.manual_seed(arguments.seed)
    model = build(arguments.model)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if "running_" in name:
            tensor.zero_()
    batch, size = arguments.batch, arguments.size
    # Like photographs: large patches and noise.
    patches = F.interpolate(torch.randn(batch, 3, 8, 8), size=(size, size), mode="bilinear")
    images = patches + 0.5 * torch.randn(batch, 3, size, size)
    labels = torch.randint(0, 1000, (batch,), dtype=torch.int32)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    save_file(state, arguments.folder / "model.safetensors")
    save_file({"images": images, "labels": labels}, arguments.folder / "batch.safetensors")


def torch_step(arguments, dtype, memory_format):
    """What PyTorch makes of the step: name to tensor."""
    model = build(arguments.model)
    stored = load_file(arguments.folder / "model.safetensors")
    # Not `load_state_dict`, which in mnasnet asks for a version that the file does not hold.
    for name, tensor in model.state_dict().items():
        tensor.copy_(stored[name])
    model = model.to(dtype=dtype, memory_format=memory_format)
    batch = load_file(arguments.folder / "batch.safetensors")
    images = batch["images"].to(dtype=dtype).contiguous(memory_format=memory_format)
    logits = model(images)
    loss = F.cross_entropy(logits, batch["labels"].long())
    loss.backward()
    found = {name: tensor for name, tensor in model.state_dict().items() if "running_" in name}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    found |= {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    return {name: tensor.double().contiguous() for name, tensor in found.items()}


def kind(name, tensor):
    if name in ("logits", "loss"):
        return name
    if "running_" in name:
        return name.rpartition(".")[2]
    return f"gradients of {tensor.dim()} dimensions"


def compare(arguments):
    exact = torch_step(arguments, torch.float64, torch.contiguous_format)
    found = {
        "kiln": load_file(arguments.folder / "gradients.safetensors") | load_file(arguments.folder / "outputs.safetensors"),
        "torch": torch_step(arguments, torch.float32, torch.contiguous_format),
        "channels-last": torch_step(arguments, torch.float32, torch.channels_last),
    }
    kinds = {}
    for name, expected in exact.items():
        norm = expected.norm()

        def error(whose):
            return ((found[whose][name].double() - expected).norm() / norm).item() / UNIT

        errors = {whose: error(whose) for whose in found}
        # A gradient that is zero but for rounding has no relative error.
        if not norm > 0 or errors["torch"] * UNIT > 0.01:
            continue
        kinds.setdefault(kind(name, expected), []).append(errors)
        if arguments.verbose:
            print(f"{name:50}", *(f"{errors[whose]:10.2f}" for whose in found))
    print(f"{arguments.model:29} {'kiln':>9} {'torch':>9} {'ch.-last':>9}   kiln/torch: median, 90 %, most   kiln/channels-last")
    for name, rows in sorted(kinds.items()):
        means = [torch.tensor([row[whose] for row in rows]).clamp(min=1e-3).log().mean().exp() for whose in found]
        text = f"  {name:27} " + " ".join(f"{mean:9.2f}" for mean in means)
        for whose in ("torch", "channels-last"):
            ratios = torch.tensor([row["kiln"] / max(row[whose], 1e-3) for row in rows])
            text += "     " + " ".join(f"{ratios.quantile(q):8.2f}" for q in (0.5, 0.9, 1.0))
        print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    {"write": write, "compare": compare}[arguments.what](arguments)


if __name__ == "__main__":
    main()
