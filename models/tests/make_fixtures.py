#!/usr/bin/env python3
"""Make the fixtures that compare the models of this crate with their originals.

usage: python3 make_fixtures.py [FAMILY ...]
       python3 make_fixtures.py --random N --out DIR [--seed S] [FAMILY ...]

Needs torch, torchvision, timm, transformers and safetensors; runs on the CPU in half a minute.

For each family small models are built from the original classes, given random weights, and run once in training mode: a
fixture holds inputs, targets, weights, logits, the loss and the gradient of every parameter. Reference values are
computed in f64 and stored in f32, so that the comparison sees only the rounding of the code under test. Dropout is off:
the two random streams have nothing in common. `fixtures/architectures.txt` lists names and shapes of full-size models.

With --random, N further configurations of each family are drawn and written to DIR; the tests compare them too when
the environment variable KILN_MODEL_FIXTURES names that folder.

The metadata of a fixture holds the family and the configuration as JSON: that of transformers where there is one, else the
fields of the configuration in this crate.
"""
import argparse
import copy
import json
import pathlib
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent / "fixtures"
OUT = HERE


def randomize(net):
    """Give norms, biases and running statistics values that differ from their start, so that none can be mixed up."""
    for name, p in net.named_parameters():
        with torch.no_grad():
            if p.dim() == 1 and name.endswith("weight"):
                p.uniform_(0.5, 1.5)
            elif p.dim() == 1:
                p.normal_(0, 0.1)
    for name, b in net.named_buffers():
        if name.endswith("running_mean"):
            b.normal_(0, 0.1)
        elif name.endswith("running_var"):
            b.uniform_(0.5, 1.5)


def stored(tensor):
    tensor = tensor.detach().contiguous().clone()
    return tensor.float() if tensor.is_floating_point() else tensor


def step(net, inputs, run, dtype):
    """Evaluation logits, then one training step; returns everything it computes, by name."""
    net = copy.deepcopy(net).to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    net.eval()
    with torch.no_grad():
        found = {"output.eval_logits": stored(run(net, inputs)[0])}
    net.train()
    logits, loss = run(net, inputs)
    loss.backward()
    found["output.logits"] = stored(logits)
    found["output.loss"] = stored(loss.reshape(1))
    for key, p in net.named_parameters():
        found[f"grad.{key}"] = stored(p.grad if p.grad is not None else torch.zeros_like(p))
    for key, b in net.named_buffers():
        if key.endswith(("running_mean", "running_var")):
            found[f"after.{key}"] = stored(b)
    return found


def well_conditioned(exact, rounded):
    """Whether PyTorch's own step in f32 is near the one in f64.

    Where it is not, an activation lies so near to a kink (of a ReLU, between two candidates of a max pool) that rounding
    decides on which side, and a comparison would test the rounding.
    """
    largest = max(v.abs().max() for k, v in exact.items() if k.startswith("grad."))
    for key, value in exact.items():
        scale = value.abs().max()
        if scale > 1e-9 * largest and (value - rounded[key]).abs().max() > 4e-5 * scale:
            return False
    return True


def save(name, family, net, config, inputs, run, extra=None, drop=()):
    """Run `run(net, inputs) -> (logits, loss)` in f64 and write everything to one file."""
    for attempt in range(12):
        exact = step(net, inputs, run, torch.float64)
        if well_conditioned(exact, step(net, inputs, run, torch.float32)):
            break
        inputs = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in inputs.items()}
    else:
        print(f"{name:24} left out: no well-conditioned inputs found")
        return
    tensors = {f"input.{key}": stored(value) for key, value in inputs.items()}
    for key, value in net.state_dict().items():
        if not key.endswith("num_batches_tracked") and key not in drop:
            tensors[f"weight.{key}"] = stored(value)
    tensors.update(exact)
    for key, value in (extra or {}).items():
        tensors[key] = stored(value)
    text = config if isinstance(config, str) else json.dumps(config)
    path = OUT / f"{name}.safetensors"
    save_file(tensors, path, metadata={"family": family, "config": text})
    path.chmod(0o644)
    loss = exact["output.loss"].item()
    print(f"{name:24} {path.stat().st_size / 1024:8.0f} KiB  loss {loss:.6f}  inputs drawn {attempt + 1}x")


def classify(net, x):
    logits = net(x["images"])
    return logits, F.cross_entropy(logits, x["targets"])


def images(size, classes, batch):
    return {"images": torch.randn(batch, 3, size, size), "targets": torch.randint(0, classes, (batch,))}


def save_classifier(name, family, net, config, size, batch=4):
    save(name, family, net, config, images(size, config["num_classes"], batch), classify)


# Each family: the committed cases, a draw of a random one, and the function that builds and saves a case.


class Mlp:
    cases = {"mlp": dict(widths=[12, 16, 16, 5])}

    def draw(rng):
        return dict(widths=[rng.randint(2, 30) for _ in range(rng.randint(2, 5))])

    def save(name, c):
        widths = c["widths"]
        layers = []
        for i, o in zip(widths, widths[1:]):
            layers += [nn.GELU(), nn.Linear(i, o)]
        net = nn.Sequential(*layers[1:])
        randomize(net)
        inputs = {"images": torch.randn(6, widths[0]) * 2, "targets": torch.randint(0, widths[-1], (6,))}
        save(name, "mlp", net, c, inputs, classify)


class ResNet:
    base = dict(block="Basic", blocks=[2, 1, 1, 1], num_classes=5, groups=1, width_per_group=64, stem_channels=4)
    cases = {
        "resnet_basic": base,
        "resnet_bottleneck": {**base, "block": "Bottleneck", "blocks": [1, 2, 1, 1]},
        "resnext": {**base, "block": "Bottleneck", "blocks": [1, 1, 1, 1], "groups": 2, "width_per_group": 32},
    }

    def draw(rng):
        c = dict(blocks=[rng.randint(1, 2) for _ in range(4)], num_classes=rng.randint(2, 9))
        if rng.random() < 0.4:
            return dict(c, block="Basic", groups=1, width_per_group=64, stem_channels=rng.choice([4, 5, 8]))
        groups = rng.choice([1, 2, 4])
        return dict(c, block="Bottleneck", groups=groups, width_per_group=rng.choice([16, 32, 64]), stem_channels=8)

    def save(name, c):
        """torchvision's ResNet with fewer channels: the class fixes 64, the blocks and the forward pass do not."""
        from torchvision.models import resnet

        block = {"Basic": resnet.BasicBlock, "Bottleneck": resnet.Bottleneck}[c["block"]]
        width, classes = c["stem_channels"], c["num_classes"]
        grouped = dict(groups=c["groups"], width_per_group=c["width_per_group"])
        net = resnet.ResNet(block, [1, 1, 1, 1], num_classes=classes, **grouped)
        net.inplanes = width
        net.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        net.bn1 = nn.BatchNorm2d(width)
        for i, count in enumerate(c["blocks"]):
            setattr(net, f"layer{i + 1}", net._make_layer(block, width << i, count, stride=1 if i == 0 else 2))
        net.fc = nn.Linear((width << 3) * block.expansion, classes)
        randomize(net)
        save_classifier(name, "resnet", net, c, 64)


class AlexNet:
    cases = {"alexnet": dict(num_classes=5, dropout=0.0, channels=[4, 6, 8, 6, 6], hidden=16)}

    def draw(rng):
        return dict(num_classes=rng.randint(2, 9), dropout=0.0, channels=[rng.randint(3, 9) for _ in range(5)],
                    hidden=rng.randint(8, 24))

    def save(name, c):
        """The original's sequences with fewer channels; 96 pixels leave 2x2 for the 6x6 grid, so its cells overlap."""
        from torchvision.models import AlexNet as Original

        net = Original(num_classes=c["num_classes"], dropout=0.0)
        before, hidden = 3, c["hidden"]
        for place, width in zip([0, 3, 6, 8, 10], c["channels"]):
            old = net.features[place]
            net.features[place] = nn.Conv2d(before, width, old.kernel_size, old.stride, old.padding)
            before = width
        for place, (i, o) in zip([1, 4, 6], [(before * 36, hidden), (hidden, hidden), (hidden, c["num_classes"])]):
            net.classifier[place] = nn.Linear(i, o)
        randomize(net)
        save_classifier(name, "alexnet", net, c, 96, batch=2)


class Vgg:
    cases = {"vgg": dict(stages=[[4], [6, 6]], num_classes=5, dropout=0.0, hidden=16)}

    def draw(rng):
        stages = [[rng.randint(3, 8) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]
        return dict(stages=stages, num_classes=rng.randint(2, 9), dropout=0.0, hidden=rng.randint(8, 24))

    def save(name, c):
        from torchvision.models.vgg import VGG, make_layers

        net = VGG(make_layers([item for stage in c["stages"] for item in [*stage, "M"]]), dropout=0.0)
        last, hidden = c["stages"][-1][-1], c["hidden"]
        for place, (i, o) in zip([0, 3, 6], [(last * 49, hidden), (hidden, hidden), (hidden, c["num_classes"])]):
            net.classifier[place] = nn.Linear(i, o)
        randomize(net)
        save_classifier(name, "vgg", net, c, 32)


class SqueezeNet:
    fires = [[2, 4], [2, 4], [3, 4], [3, 6], [4, 6], [4, 6], [4, 8], [4, 8]]
    cases = {"squeezenet": dict(num_classes=5, dropout=0.0, stem_channels=6, fires=fires)}

    def draw(rng):
        fires = [[rng.randint(3, 6), rng.randint(4, 8)] for _ in range(8)]
        return dict(num_classes=rng.randint(2, 9), dropout=0.0, stem_channels=rng.randint(4, 8), fires=fires)

    def save(name, c):
        """75 pixels give odd sizes before each pool, so that its last window hangs over the edge (ceil mode)."""
        from torchvision.models.squeezenet import Fire
        from torchvision.models.squeezenet import SqueezeNet as Original

        net = Original("1_1", num_classes=c["num_classes"], dropout=0.0)
        before = c["stem_channels"]
        net.features[0] = nn.Conv2d(3, before, 3, stride=2)
        for place, (squeeze, expand) in zip([3, 4, 6, 7, 9, 10, 11, 12], c["fires"]):
            net.features[place] = Fire(before, squeeze, expand, expand)
            before = 2 * expand
        net.classifier[1] = nn.Conv2d(before, c["num_classes"], 1)
        with torch.no_grad():  # so narrow a chain of ReLUs would pass nothing with other biases
            for p in net.parameters():
                p.uniform_(0.0, 0.4) if p.dim() == 1 else p.mul_(1.3)
        save_classifier(name, "squeezenet", net, c, 75)


class MobileNet:
    groups = [[1, 8, 1, 1], [6, 16, 2, 2], [2, 24, 1, 2]]
    cases = {"mobilenet": dict(num_classes=5, width_mult=0.5, groups=groups, dropout=0.0)}

    def draw(rng):
        groups = [[rng.choice([1, 2, 3, 6]), rng.randint(8, 40), rng.randint(1, 2), rng.randint(1, 2)] for _ in range(3)]
        width = rng.choice([0.35, 0.5, 0.75, 1.0])
        return dict(num_classes=rng.randint(2, 9), width_mult=width, groups=groups, dropout=0.0)

    def save(name, c):
        from torchvision.models import MobileNetV2

        setting = dict(width_mult=c["width_mult"], inverted_residual_setting=c["groups"])
        net = MobileNetV2(num_classes=c["num_classes"], dropout=0.0, **setting)
        randomize(net)
        save_classifier(name, "mobilenet", net, c, 48)


class MnasNet:
    cases = {"mnasnet": dict(num_classes=5, alpha=0.1, dropout=0.0)}

    def draw(rng):
        return dict(num_classes=rng.randint(2, 9), alpha=rng.choice([0.1, 0.2, 0.3]), dropout=0.0)

    def save(name, c):
        from torchvision.models import MNASNet

        net = MNASNet(c["alpha"], num_classes=c["num_classes"], dropout=0.0)
        randomize(net)
        save_classifier(name, "mnasnet", net, c, 96)


class Vit:
    base = dict(embed_dim=24, depth=2, num_heads=3, image_size=24, patch_size=8, num_classes=5, mlp_ratio=2.0)
    cases = {"vit": base}

    def draw(rng):
        heads, patch = rng.choice([1, 2, 4]), rng.choice([4, 8])
        return dict(embed_dim=heads * rng.choice([4, 8, 12]), depth=rng.randint(1, 3), num_heads=heads,
                    image_size=patch * rng.randint(2, 5), patch_size=patch, num_classes=rng.randint(2, 9),
                    mlp_ratio=rng.choice([1.5, 2.0, 4.0]))

    def save(name, c):
        from timm.models.vision_transformer import VisionTransformer

        net = VisionTransformer(img_size=c["image_size"], **{k: v for k, v in c.items() if k != "image_size"})
        randomize(net)
        with torch.no_grad():  # timm begins so small that a mistake in a layer would not show
            net.cls_token.normal_(0, 0.5)
            for key, p in net.named_parameters():
                if key.endswith("weight") and p.dim() == 2:
                    p.mul_(8.0)
        save_classifier(name, "vit", net, c, c["image_size"])


class Bert:
    base = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
                max_position_embeddings=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                initializer_range=0.2)
    cases = {
        "bert_classifier": dict(kind="classifier", num_labels=3),
        "bert_masked_lm": dict(kind="masked_lm", hidden_act="gelu_new"),
        "bert_untied": dict(kind="masked_lm", hidden_act="relu", tie_word_embeddings=False),
        "bert_embedding": dict(kind="embedding"),
    }

    def draw(rng):
        heads = rng.choice([1, 2, 3, 6])
        return dict(kind=rng.choice(["classifier", "masked_lm", "embedding"]), num_attention_heads=heads,
                    hidden_size=heads * rng.choice([4, 7, 10]), num_hidden_layers=rng.randint(1, 4),
                    intermediate_size=rng.randint(8, 50), type_vocab_size=rng.randint(2, 3),
                    hidden_act=rng.choice(["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"]),
                    layer_norm_eps=rng.choice([1e-12, 1e-5]), pad_token_id=rng.choice([0, 1, 7, None]),
                    num_labels=rng.randint(2, 5), tie_word_embeddings=rng.random() < 0.5)

    def save(name, c):
        from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

        kind = c["kind"]
        # transformers reads these from the file and warns about unknown fields
        config = BertConfig(**{**Bert.base, **{k: v for k, v in c.items() if k != "kind"}})
        classes = {"classifier": BertForSequenceClassification, "masked_lm": BertForMaskedLM, "embedding": BertModel}
        net = classes[kind](config)
        randomize(net)
        pad = config.pad_token_id or 0
        ids = torch.randint(2, 50, (3, 9))
        keep = torch.ones(3, 9, dtype=torch.long)
        keep[1, 6:] = 0
        keep[2, 4:] = 0
        ids[keep == 0] = pad
        ids[0, 3] = pad  # the padding token inside a text: it counts, but its embedding gets no gradient
        inputs = {"tokens": ids, "keep": keep}
        drop = ()
        if kind == "embedding":
            inputs["direction"] = torch.randn(3, config.hidden_size)

            def run(net, x):  # the mean pooling of sentence-transformers
                hidden = net(x["tokens"], attention_mask=x["keep"]).last_hidden_state
                weight = x["keep"].unsqueeze(-1).to(hidden.dtype)
                mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
                mean = F.normalize(mean, dim=1)
                return mean, (mean * x["direction"]).sum()
        else:
            segments = torch.zeros_like(ids)
            segments[:, 5:] = 1
            inputs["segments"] = segments
            if kind == "classifier":
                inputs["targets"] = torch.randint(0, config.num_labels, (3,))
            else:
                labels = torch.randint(0, 50, (3, 9))
                labels[torch.rand(3, 9) < 0.6] = -100
                labels[0, 1] = 7
                inputs["targets"] = labels
                tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
                drop = tied if config.tie_word_embeddings else ("cls.predictions.bias",)

            def run(net, x):
                keys = dict(attention_mask=x["keep"], token_type_ids=x["segments"], labels=x["targets"])
                out = net(x["tokens"], **keys)
                return out.logits, out.loss

        save(name, f"bert_{kind}", net, config.to_json_string(), inputs, run, drop=drop)


class Llama:
    base = dict(vocab_size=40, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=32, initializer_range=0.2)
    rope3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=16)
    cases = {
        "llama2": dict(),
        "llama_gqa_tied": dict(num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=3),
        "llama3": dict(num_key_value_heads=1, head_dim=8, rope_parameters=rope3, attention_bias=True, mlp_bias=True),
        "llama_linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.5)),
        "llama_dynamic": dict(max_position_embeddings=8,
                              rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=2.0)),
        # Older files, stored as they are: one setting in two places, and which of them transformers takes.
        "llama3_length_outside": dict(older=dict(
            rope_theta=500.0, original_max_position_embeddings=8,
            rope_scaling=dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                              original_max_position_embeddings=16))),
        "llama_two_scalings": dict(older=dict(
            rope_theta=300.0, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
            rope_scaling=dict(type="linear", factor=3.0))),
    }

    def draw(rng):
        kv = rng.choice([1, 2, 3])
        heads = kv * rng.choice([1, 2, 4])
        theta = rng.choice([50.0, 10000.0, 500000.0])
        rope = rng.choice([
            dict(rope_type="default", rope_theta=theta),
            dict(rope_type="linear", rope_theta=theta, factor=rng.uniform(1, 4)),
            dict(rope_type="dynamic", rope_theta=theta, factor=rng.uniform(1, 4)),
            dict(Llama.rope3, rope_theta=theta, factor=rng.uniform(2, 9)),
        ])
        return dict(num_attention_heads=heads, num_key_value_heads=kv, head_dim=rng.choice([2, 4, 6, 8]) * 2,
                    hidden_size=heads * rng.choice([2, 3, 5]), intermediate_size=rng.randint(8, 50),
                    num_hidden_layers=rng.randint(1, 4), rms_norm_eps=rng.choice([1e-6, 1e-5]), rope_parameters=rope,
                    tie_word_embeddings=rng.random() < 0.5, attention_bias=rng.random() < 0.5,
                    mlp_bias=rng.random() < 0.5, hidden_act=rng.choice(["silu", "silu", "gelu", "relu"]),
                    max_position_embeddings=rng.choice([8, 40]), pad_token_id=rng.choice([None, 3]))

    def save(name, c):
        from transformers import LlamaConfig, LlamaForCausalLM

        older = c.pop("older", None)
        if older is None:
            config = LlamaConfig(**{**Llama.base, **c})
            text = config.to_json_string()
        else:
            raw = dict(Llama.base, **older)
            text = json.dumps(raw)
            config = LlamaConfig.from_dict(copy.deepcopy(raw))
        net = LlamaForCausalLM(config)
        randomize(net)
        ids = torch.randint(0, 40, (2, 12))
        ids[0, 5] = 3

        def run(net, x):
            out = net(x["tokens"], labels=x["tokens"])
            return out.logits, out.loss

        extra = {}
        if config.rope_parameters["rope_type"] != "dynamic" and config.max_position_embeddings >= 22:
            # What greedy decoding adds to the first row, in f64 and without a cache.
            exact = copy.deepcopy(net).double().eval()
            tokens = ids[:1].clone()
            with torch.no_grad():
                for _ in range(10):
                    logits = exact(tokens, use_cache=False).logits
                    tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            extra = {"output.greedy": tokens[0, ids.shape[1]:]}
        drop = ("lm_head.weight",) if config.tie_word_embeddings else ()
        save(name, "llama", net, text, {"tokens": ids}, run, extra, drop)


FAMILIES = dict(mlp=Mlp, resnet=ResNet, alexnet=AlexNet, vgg=Vgg, squeezenet=SqueezeNet, mobilenet=MobileNet,
                mnasnet=MnasNet, vit=Vit, bert=Bert, llama=Llama)


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

    minilm = dict(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
    tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    llamas = {  # vocabulary, width, inner width, layers, heads, key and value heads
        "llama-tiny": (4096, 256, 688, 4, 8, 8), "llama-15m": (32000, 288, 768, 6, 6, 6),
        "llama-125m": (32000, 768, 2048, 12, 12, 12), "llama-1b": (128256, 2048, 8192, 16, 32, 8),
        "decoder-2l": (3200, 1024, 32768, 2, 8, 4),
    }
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads")
    with torch.device("meta"):
        for name in ["resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d", "alexnet",
                     "vgg16", "mobilenet_v2", "mnasnet1_0", "squeezenet1_1"]:
            add(name, getattr(torchvision.models, name)(weights=None))
        for name in ["vit_small_patch16_224", "vit_base_patch16_224"]:
            add(name, timm.create_model(name))
        add("bert-base", BertForSequenceClassification(BertConfig()))
        add("bert-minilm", BertForSequenceClassification(BertConfig(**minilm)))
        add("bert-base-mlm", BertForMaskedLM(BertConfig()), skip=tied)
        for name, sizes in llamas.items():
            add(name, LlamaForCausalLM(LlamaConfig(**dict(zip(fields, sizes)))))
    (OUT / "architectures.txt").write_text("\n".join(lines) + "\n")
    print(f"architectures.txt: {len(lines)} lines")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", help="families to make, all by default")
    parser.add_argument("--random", type=int, default=0, help="draw this many cases of each family")
    parser.add_argument("--out", type=pathlib.Path, default=HERE, help="folder of the files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    args = parser.parse_args()
    OUT = args.out
    OUT.mkdir(parents=True, exist_ok=True)
    for family in args.families or [*FAMILIES, "architectures"]:
        torch.manual_seed(args.seed)
        if family == "architectures":
            if not args.random:
                architectures()
            continue
        maker, rng = FAMILIES[family], random.Random(args.seed)
        cases = maker.cases
        if args.random:
            cases = {f"{family}_{args.seed}_{i}": maker.draw(rng) for i in range(args.random)}
        for name, case in cases.items():
            maker.save(name, case)
