"""Makes the fixtures of this folder with PyTorch and transformers.

    python make_fixtures.py archives            # state_*.bin: the forms of torch.save, of checkpoints, and one with code
    python make_fixtures.py embeddings MODEL    # minilm_embeddings.json, from a folder with all-MiniLM-L6-v2
    python make_fixtures.py jpegs               # jpegs/*.jpeg: the kinds of JPEGs, with Pillow and numpy

The values in the archives follow the rule of `element` in files/common.rs, so the Rust tests know them without a file.
"""

import json
import os
import sys
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"

SHAPES = {
    "word_embeddings.weight": (7, 4),
    "mlp.0.weight": (6, 4),
    "mlp.0.bias": (6,),
    "mlp.2.weight": (4, 6),
    "bn.weight": (4,),
    "bn.bias": (4,),
    "bn.running_mean": (4,),
    "bn.running_var": (4,),
    "classifier.weight": (3, 4),
    "classifier.bias": (3,),
}

SENTENCES = [
    "A kiln turns clay into stone.",
    "The compiler fuses the optimizer into the gradient's epilogue.",
    "Where is the nearest train station?",
    "Il pleut des cordes à Paris ce matin.",
    "Two dogs are running across a snowy field, chasing a red ball.",
    "Interest rates rose by 0.25% in March, to 4.75%.",
    "hello",
    "Es ist nicht alles Gold, was glänzt.",
    "The mitochondrion is the powerhouse of the cell; photosynthesis happens elsewhere.",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows "
    "of outrageous fortune, or to take arms against a sea of troubles and by opposing end them.",
]


def tensors(dtype):
    """Element i of tensor t is (t + 1) * 8 + (i mod 31) / 4."""
    import torch

    made = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        count = torch.Size(shape).numel()
        flat = (number + 1) * 8.0 + (torch.arange(count) % 31) * 0.25
        made[name] = flat.reshape(shape).to(dtype)
    return made


def checkpoint():
    """What PyTorch's ImageNet example saves: the weights beside a tensor and the optimizer's."""
    import torch

    state = tensors(torch.float32)
    parameters = [torch.nn.Parameter(state[name].clone()) for name in ("bn.weight", "bn.bias")]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "epoch": 3,
        "best_acc1": torch.tensor(71.5),
        "state_dict": state,
        "optimizer": optimizer.state_dict(),
    }


class Command:
    def __reduce__(self):
        return os.system, ("touch /tmp/this-pickle-was-executed",)


def archives():
    import torch

    torch.save(tensors(torch.float32), FIXTURES / "state_zip.bin")
    # A matrix that is a transposed view, and two tensors that share one storage.
    half = tensors(torch.bfloat16)
    half["mlp.0.weight"] = half["mlp.0.weight"].t().contiguous().t()
    shared = torch.cat([half["bn.weight"], half["bn.bias"]])
    half["bn.weight"], half["bn.bias"] = shared[:4], shared[4:]
    torch.save({"state_dict": half, "epoch": 3}, FIXTURES / "state_nested_bf16.bin")
    torch.save(tensors(torch.float32), FIXTURES / "state_legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(checkpoint(), FIXTURES / "state_checkpoint_legacy.bin", _use_new_zipfile_serialization=False)
    # An entry that runs a command where pickles are executed.
    torch.save({**tensors(torch.float32), "hook": Command()}, FIXTURES / "state_with_code.bin")


def embeddings(model_folder):
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModel.from_pretrained(model_folder).eval()
    batch = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    vectors = torch.nn.functional.normalize(pooled, dim=1)
    fixture = {
        "sentences": SENTENCES,
        "ids": [row[: int(m.sum())].tolist() for row, m in zip(batch["input_ids"], batch["attention_mask"])],
        "embeddings": [[round(x, 8) for x in row] for row in vectors.tolist()],
    }
    text = json.dumps(fixture, ensure_ascii=False).replace("], [", "],\n[").replace('", "', '",\n"')
    (FIXTURES / "minilm_embeddings.json").write_text(text + "\n")


def jpegs():
    """Waves of all colours. Those that are called plain are the ones that hardware decodes."""
    import numpy as np
    from PIL import Image

    def waves(width, height):
        x, y = np.meshgrid(np.arange(width), np.arange(height))
        levels = [np.sin(x / 9 + y / 14), np.cos(x / 17 - y / 8), np.sin((x + y) / 11)]
        return Image.fromarray((127.5 + 110 * np.stack(levels, -1)).astype(np.uint8))

    (FIXTURES / "jpegs").mkdir(exist_ok=True)
    for name, size, mode, options in [
        ("plain-420", (67, 45), "RGB", {"subsampling": "4:2:0"}),
        ("plain-422", (50, 71), "RGB", {"subsampling": "4:2:2"}),
        ("plain-444", (33, 40), "RGB", {"subsampling": "4:4:4"}),
        ("plain-grey", (61, 30), "L", {}),
        ("plain-restarts", (96, 64), "RGB", {"subsampling": "4:2:0", "restart_marker_blocks": 3}),
        ("plain-tables", (48, 48), "RGB", {"optimize": True}),
        ("other-progressive", (64, 40), "RGB", {"progressive": True}),
        ("other-cmyk", (40, 40), "CMYK", {}),
        ("other-rgb", (40, 56), "RGB", {"keep_rgb": True}),
    ]:
        waves(*size).convert(mode).save(FIXTURES / "jpegs" / f"{name}.jpeg", quality=90, **options)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["archives"]:
            archives()
        case ["embeddings", folder]:
            embeddings(folder)
        case ["jpegs"]:
            jpegs()
        case _:
            sys.exit(__doc__)
