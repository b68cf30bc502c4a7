#!/usr/bin/env python3
"""Make the fixtures that compare the models of this crate with their originals.

usage: python3 make_fixtures.py [NAME ...]      (needs torch, torchvision, timm, transformers and safetensors; runs on the CPU)

For each family a small model is built from the original classes, given random weights, and run once in training mode: the
fixture holds inputs, targets, weights, logits, the loss and the gradient of every parameter. Reference values are computed in
f64 and stored in f32, so that the comparison sees only the rounding of the code under test. Dropout is off: the two random
streams have nothing in common. `fixtures/architectures.txt` lists names and shapes of the full-size models.

The metadata of a fixture holds the configuration as JSON: that of transformers where there is one, else the
arguments of the model in this crate.
"""
import json
import pathlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).parent / "fixtures"


def randomize(net, scale=1.0):
    """Give norms, biases and running statistics values that differ from their start, so that none can be mixed up."""
    for name, p in net.named_parameters():
        with torch.no_grad():
            if p.dim() == 1 and name.endswith("weight"):
                p.uniform_(0.5, 1.5)
            elif p.dim() == 1:
                p.normal_(0, 0.1)
            elif scale != 1.0:
                p.mul_(scale)
    for name, b in net.named_buffers():
        if name.endswith("running_mean"):
            b.normal_(0, 0.1)
        elif name.endswith("running_var"):
            b.uniform_(0.5, 1.5)
    for p in net.parameters():  # weights must be representable in f32
        p.data = p.data.float()


def save(name, net, config, inputs, run, extra=None, drop=()):
    """Run `run(net, inputs) -> (logits, loss)` in f64 and write everything to one file."""
    torch.manual_seed(1)
    tensors = {}
    f32 = lambda t: t.detach().to(torch.float32).contiguous().clone() if t.is_floating_point() else t.detach().contiguous().clone()
    for key, value in inputs.items():
        tensors[f"input.{key}"] = f32(value)
    for key, value in net.state_dict().items():
        if not key.endswith("num_batches_tracked") and key not in drop:
            tensors[f"weight.{key}"] = f32(value)
    net = net.double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    net.eval()
    with torch.no_grad():
        tensors["output.eval_logits"] = f32(run(net, inputs)[0])
    net.train()
    logits, loss = run(net, inputs)
    loss.backward()
    tensors["output.logits"] = f32(logits)
    tensors["output.loss"] = f32(loss.reshape(1))
    for key, p in net.named_parameters():
        tensors[f"grad.{key}"] = f32(p.grad if p.grad is not None else torch.zeros_like(p))
    for key, b in net.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            tensors[f"after.{key}"] = f32(b)
    for key, value in (extra or {}).items():
        tensors[key] = f32(value)
    text = config if isinstance(config, str) else json.dumps(config)
    path = OUT / f"{name}.safetensors"
    save_file(tensors, path, metadata={"config": text})
    print(f"{name:24} {path.stat().st_size / 1024:8.0f} KiB  loss {loss.item():.6f}")


def classify(net, x):
    logits = net(x["images"])
    return logits, F.cross_entropy(logits, x["targets"])


def image_batch(size, classes=5, batch=4):
    return {"images": torch.randn(batch, 3, size, size), "targets": torch.randint(0, classes, (batch,))}


def mlp():
    net = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))
    randomize(net)
    inputs = {"images": torch.randn(6, 12) * 2, "targets": torch.randint(0, 5, (6,))}
    save("mlp", net, {"widths": [12, 16, 16, 5]}, inputs, classify)


def small_resnet(block, layers, width, classes, groups, width_per_group):
    """torchvision's ResNet with fewer channels: the class fixes 64, the blocks and the forward pass do not."""
    from torchvision.models.resnet import ResNet

    net = ResNet(block, [1, 1, 1, 1], num_classes=classes, groups=groups, width_per_group=width_per_group)
    net.inplanes = width
    net.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    for i, count in enumerate(layers):
        setattr(net, f"layer{i + 1}", net._make_layer(block, width << i, count, stride=1 if i == 0 else 2))
    net.fc = nn.Linear((width << 3) * block.expansion, classes)
    return net


def resnet():
    from torchvision.models.resnet import BasicBlock, Bottleneck

    for name, kind, block, layers, width, groups, wpg in [
        ("resnet_basic", "Basic", BasicBlock, [2, 1, 1, 1], 4, 1, 64),
        ("resnet_bottleneck", "Bottleneck", Bottleneck, [1, 2, 1, 1], 4, 1, 64),
        ("resnext", "Bottleneck", Bottleneck, [1, 1, 1, 1], 4, 2, 32),
    ]:
        net = small_resnet(block, layers, width, 5, groups, wpg)
        randomize(net)
        config = {"block": kind, "blocks": layers, "num_classes": 5, "groups": groups, "width_per_group": wpg, "stem_channels": width}
        save(name, net, config, image_batch(64), classify)


def bert():
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

    base = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
                max_position_embeddings=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2)
    ids = torch.randint(1, 50, (3, 9))
    keep = torch.ones(3, 9, dtype=torch.long)
    keep[1, 6:] = 0
    keep[2, 4:] = 0
    ids[keep == 0] = 0
    ids[0, 3] = 0  # the padding token inside a text: it counts, but its embedding gets no gradient
    segments = torch.zeros_like(ids)
    segments[:, 5:] = 1
    inputs = {"tokens": ids, "keep": keep, "segments": segments}

    config = BertConfig(num_labels=3, **base)
    net = BertForSequenceClassification(config)
    randomize(net)

    def run(net, x):
        out = net(x["tokens"], attention_mask=x["keep"], token_type_ids=x["segments"], labels=x["targets"])
        return out.logits, out.loss

    save("bert_classifier", net, config.to_json_string(), {**inputs, "targets": torch.randint(0, 3, (3,))}, run)

    labels = torch.randint(0, 50, (3, 9))
    labels[torch.rand(3, 9) < 0.6] = -100
    labels[0, 1] = 7
    for name, extra in [("bert_masked_lm", dict(hidden_act="gelu_new")), ("bert_untied", dict(hidden_act="relu", tie_word_embeddings=False))]:
        config = BertConfig(**base, **extra)
        net = BertForMaskedLM(config)
        randomize(net)
        drop = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias") if config.tie_word_embeddings else ("cls.predictions.bias",)
        save(name, net, config.to_json_string(), {**inputs, "targets": labels}, run, drop=drop)

    config = BertConfig(**base)
    net = BertModel(config)
    randomize(net)

    def embed(net, x):  # mean pooling of sentence-transformers
        hidden = net(x["tokens"], attention_mask=x["keep"]).last_hidden_state
        weight = x["keep"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        mean = F.normalize(mean, dim=1)
        return mean, (mean * x["direction"]).sum()

    save("bert_embedding", net, config.to_json_string(), {"tokens": ids, "keep": keep, "direction": torch.randn(3, 24)}, embed)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    base = dict(vocab_size=40, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=32, initializer_range=0.2)
    rope3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 16}
    cases = {
        "llama2": dict(),
        "llama_gqa_tied": dict(num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=3),
        "llama3": dict(num_key_value_heads=1, head_dim=8, rope_parameters=rope3, attention_bias=True, mlp_bias=True),
        "llama_linear": dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}),
        "llama_dynamic": dict(max_position_embeddings=8, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}),
    }
    for name, extra in cases.items():
        config = LlamaConfig(**{**base, **extra})
        net = LlamaForCausalLM(config)
        randomize(net)
        ids = torch.randint(0, 40, (2, 12))
        ids[0, 5] = 3

        def run(net, x):
            out = net(x["tokens"], labels=x["tokens"])
            return out.logits, out.loss

        # What greedy decoding adds to the first row, in f64, for the cached path.
        net.eval()
        tokens = ids[:1].clone()
        copy = LlamaForCausalLM(config).double().eval()
        copy.load_state_dict(net.state_dict())
        if name != "llama_dynamic":
            with torch.no_grad():
                for _ in range(10):
                    tokens = torch.cat([tokens, copy(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        drop = ("lm_head.weight",) if config.tie_word_embeddings else ()
        save(name, net, config.to_json_string(), {"tokens": ids}, run, {"output.greedy": tokens[0, ids.shape[1]:]}, drop)


def alexnet():
    """The original's sequences with fewer channels; 96 pixels leave 2x2 for the 6x6 grid, so its cells overlap."""
    from torchvision.models import AlexNet

    c, hidden = [4, 6, 8, 6, 6], 16
    net = AlexNet(num_classes=5, dropout=0.0)
    before = 3
    for place, width in zip([0, 3, 6, 8, 10], c):
        old = net.features[place]
        net.features[place] = nn.Conv2d(before, width, old.kernel_size, old.stride, old.padding)
        before = width
    for place, (i, o) in zip([1, 4, 6], [(before * 36, hidden), (hidden, hidden), (hidden, 5)]):
        net.classifier[place] = nn.Linear(i, o)
    randomize(net)
    save("alexnet", net, {"num_classes": 5, "dropout": 0.0, "channels": c, "hidden": hidden}, image_batch(96, batch=2), classify)


def vgg():
    from torchvision.models.vgg import VGG, make_layers

    net = VGG(make_layers([4, "M", 6, 6, "M"]), num_classes=5, dropout=0.0)
    for place, (i, o) in zip([0, 3, 6], [(6 * 49, 16), (16, 16), (16, 5)]):
        net.classifier[place] = nn.Linear(i, o)
    randomize(net)
    save("vgg", net, {"stages": [[4], [6, 6]], "num_classes": 5, "dropout": 0.0, "hidden": 16}, image_batch(32), classify)


def squeezenet():
    """Odd sizes before each pool, so that its last window hangs over the edge (ceil mode)."""
    from torchvision.models.squeezenet import Fire, SqueezeNet

    fires = [[2, 4], [2, 4], [3, 4], [3, 6], [4, 6], [4, 6], [4, 8], [4, 8]]
    net = SqueezeNet("1_1", num_classes=5, dropout=0.0)
    net.features[0] = nn.Conv2d(3, 6, 3, stride=2)
    before = 6
    for place, (squeeze, expand) in zip([3, 4, 6, 7, 9, 10, 11, 12], fires):
        net.features[place] = Fire(before, squeeze, expand, expand)
        before = 2 * expand
    net.classifier[1] = nn.Conv2d(before, 5, 1)
    randomize(net, scale=1.5)
    with torch.no_grad():  # so narrow a chain of ReLUs would pass nothing
        for key, p in net.named_parameters():
            if p.dim() == 1:
                p.uniform_(0.0, 0.4)
        net.classifier[1].weight.mul_(5)
    save("squeezenet", net, {"num_classes": 5, "dropout": 0.0, "stem_channels": 6, "fires": fires}, image_batch(75), classify)


def mobilenet():
    from torchvision.models import MobileNetV2

    groups = [[1, 8, 1, 1], [6, 16, 2, 2], [2, 24, 1, 2]]
    net = MobileNetV2(num_classes=5, width_mult=0.5, inverted_residual_setting=groups, dropout=0.0)
    randomize(net)
    save("mobilenet", net, {"num_classes": 5, "width_mult": 0.5, "groups": groups, "dropout": 0.0}, image_batch(48), classify)


def mnasnet():
    from torchvision.models import MNASNet

    net = MNASNet(0.1, num_classes=5, dropout=0.0)
    randomize(net)
    save("mnasnet", net, {"num_classes": 5, "alpha": 0.1, "dropout": 0.0}, image_batch(64), classify)


def vit():
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(img_size=24, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5, mlp_ratio=2.0)
    randomize(net)
    with torch.no_grad():
        net.cls_token.normal_(0, 0.5)
        for name, p in net.named_parameters():
            if name.endswith("weight") and p.dim() == 2:
                p.mul_(8.0)
    config = {"embed_dim": 24, "depth": 2, "num_heads": 3, "image_size": 24, "patch_size": 8, "num_classes": 5, "mlp_ratio": 2.0}
    save("vit", net, config, image_batch(24), classify)


FAMILIES = {f.__name__: f for f in [mlp, resnet, bert, llama, alexnet, vgg, squeezenet, mobilenet, mnasnet, vit]}


def architectures():
    """Names, shapes and parameter counts of the full-size models, built without allocating them."""
    import timm
    import torchvision
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    lines = []

    def add(name, net, skip=()):
        params = {k for k, _ in net.named_parameters()}
        lines.append(f"# {name} {sum(p.numel() for p in net.parameters())}")
        for key, value in net.state_dict().items():
            if key.endswith("num_batches_tracked") or key in skip:
                continue
            lines.append(f"{key} {'x'.join(map(str, value.shape))}{'' if key in params else ' buffer'}")

    with torch.device("meta"):
        for name in ["resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "alexnet", "vgg16", "mobilenet_v2",
                     "mnasnet1_0", "squeezenet1_1"]:
            add(name, getattr(torchvision.models, name)(weights=None))
        for name in ["vit_small_patch16_224", "vit_base_patch16_224"]:
            add(name, timm.create_model(name))
        add("bert-base", BertForSequenceClassification(BertConfig()))
        add("bert-minilm", BertForSequenceClassification(BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)))
        add("bert-base-mlm", BertForMaskedLM(BertConfig()), skip=("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"))
        for name, sizes in [("llama-tiny", (4096, 256, 688, 4, 8, 8)), ("llama-15m", (32000, 288, 768, 6, 6, 6)),
                            ("llama-125m", (32000, 768, 2048, 12, 12, 12)), ("llama-1b", (128256, 2048, 8192, 16, 32, 8)),
                            ("decoder-2l", (3200, 1024, 32768, 2, 8, 4))]:
            vocab, hidden, inner, layers, heads, kv = sizes
            add(name, LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                                                   num_attention_heads=heads, num_key_value_heads=kv)))
    (OUT / "architectures.txt").write_text("\n".join(lines) + "\n")
    print(f"architectures.txt: {len(lines)} lines")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or [*FAMILIES, "architectures"]
    for family in wanted:
        torch.manual_seed(0)
        {**FAMILIES, "architectures": architectures}[family]()
