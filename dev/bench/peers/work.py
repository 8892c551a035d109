"""The training of both peers: the demo's model in PyTorch, from the trainer's initial bits, with its rows and rates;
and the log that the benchmark reads.

Runs in a peer's environment, which has PyTorch and NumPy.
"""
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "dev/bench"), str(ROOT / "dev/reference")]
import reference_diloco
from peer_losses import options_of_pytorch, read_tokens  # finds dev/tools, too
from metrics import log_name
from reference import unflatten


class Layer(nn.Module):
    def __init__(self, values, prefix, heads):
        super().__init__()
        self.heads = heads
        for name, tensor in values.items():
            if name.startswith(prefix):
                setattr(self, name.removeprefix(prefix), nn.Parameter(tensor.clone()))

    def forward(self, x):
        batch, length, channels = x.shape
        qkv = F.linear(F.layer_norm(x, (channels,), self.ln1w, self.ln1b), self.qkvw, self.qkvb)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in qkv.split(channels, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, self.attprojw, self.attprojb)
        hidden = F.linear(F.layer_norm(x, (channels,), self.ln2w, self.ln2b), self.fcw, self.fcb)
        return x + F.linear(F.gelu(hidden, approximate="tanh"), self.fcprojw, self.fcprojb)


class Gpt(nn.Module):
    def __init__(self, options, text):
        super().__init__()
        own = options_of_pytorch(options, text)
        shape = reference_diloco.model_shape(own)
        flat = torch.from_numpy(reference_diloco.trainer_initial_values(shape, own["--seed"]))
        values, self.vocabulary = unflatten(flat, shape), shape.vocab_size
        self.layers = nn.ModuleList(Layer(values, f"h.{layer}.", shape.heads) for layer in range(shape.layers))
        self.ends = nn.Module()  # the embeddings and the last LayerNorm
        for name in ("wte", "wpe", "lnfw", "lnfb"):
            setattr(self.ends, name, nn.Parameter(values[name].clone()))

    def forward(self, inputs, targets):
        ends = self.ends
        x = F.embedding(inputs, ends.wte) + ends.wpe[:inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        x = F.layer_norm(x, x.shape[-1:], ends.lnfw, ends.lnfb)
        return F.cross_entropy(F.linear(x, ends.wte[:self.vocabulary]).flatten(0, 1), targets.flatten())

    def fragments(self):
        """The trainer's fragments: every second layer, the other layers, and the rest."""
        return [nn.ModuleList(self.layers[0::2]), nn.ModuleList(self.layers[1::2]), self.ends]


class Work:
    """A peer's worker: its settings, a JSON object as its only argument, its data and its log."""

    def __init__(self):
        self.given = json.loads(sys.argv[1])
        self.options, self.worker, self.folder = self.given["options"], self.given["worker"], Path(self.given["folder"])
        self.text = Path(self.given["text"])
        torch.set_num_threads(1)
        self.model = Gpt(self.options, self.text)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": self.options["-c"]},
                                            {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)
        self.step, self.log, self.before = 0, None, None

    def batches(self):
        own = options_of_pytorch(self.options, self.text)
        rows = reference_diloco.batches(read_tokens(self.text, "train"), self.worker, own)
        for _ in range(self.options["-x"]):
            yield next(rows)

    def compute(self, batch):
        """Computes a step's loss and gradients, without the optimizer's update."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options["-l"] * reference_diloco.schedule(self.options, self.step)
        self.optimizer.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.item()

    def stepped(self, loss):
        """Logs a step after its end."""
        now = time.monotonic()
        self.step += 1
        self.write(type="step", step=self.step, loss=loss, seconds=now - (self.before or now))
        self.before = now

    def write(self, **line):
        if self.log is None:
            self.log = open(self.folder / log_name(self.worker), "w")
        print(json.dumps(line), file=self.log, flush=True)

    def meet(self, name):
        """Waits for the other worker, since PyTorch takes seconds to start, unless that one was killed."""
        (self.folder / f"{name}{self.worker}").touch()
        while not all((self.folder / f"{name}{worker}").exists() or (self.folder / f"killed{worker}").exists()
                      for worker in range(2)):
            time.sleep(0.02)

    def end(self):
        """Logs the validation loss and the hash of the global parameters, which the model holds by now."""
        rows, length = self.options["-b"] * self.options["-m"], self.options["-t"]
        held_out = torch.from_numpy(read_tokens(self.text, "val")[:rows * length + 1])
        inputs, targets = held_out[:-1].view(rows, length), held_out[1:].view(rows, length)
        with torch.no_grad():
            losses = [self.model(part, wanted).item() * len(part)
                      for part, wanted in zip(inputs.split(16), targets.split(16))]
        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            digest.update(parameter.detach().numpy().tobytes())
        self.write(type="end", step=self.step, loss=sum(losses) / rows, hash=digest.hexdigest()[:16])
