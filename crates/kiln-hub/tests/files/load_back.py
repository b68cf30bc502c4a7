"""Loads what save_pretrained wrote with transformers and prints its logits as JSON.

    python load_back.py FOLDER ids...

Fails if transformers finds a key missing, unexpected or of another shape.
"""

import json
import sys

import torch
import transformers

folder, ids = sys.argv[1], [int(x) for x in sys.argv[2:]]
config = transformers.AutoConfig.from_pretrained(folder)
model_class = getattr(transformers, config.architectures[0])
model, info = model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
wrong = {name: sorted(map(str, keys)) for name, keys in info.items() if keys}
if wrong:
    sys.exit(f"transformers does not agree with the file: {wrong}")
with torch.no_grad():
    out = model.eval()(torch.tensor([ids]))
values = out.logits if hasattr(out, "logits") else out.last_hidden_state
print("KILN", json.dumps(values.flatten().tolist()))
