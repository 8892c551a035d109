#!/usr/bin/env python3
"""bench_gpu's model in PyTorch on the same GPU: torch.compile, bf16 autocast, fused AdamW, and the attention
backend that --attention names. bench_gpu.py runs it.

A server, like `bench_gpu steps`: it prints one JSON line about itself. Then, for every number n on stdin, it makes n
training steps and prints their milliseconds, by the GPU's timestamps, in one line. A step is forward, backward,
clipping by the global norm and AdamW. The vocabulary is padded like the trainer's. Layers are compiled one by one,
which takes one compilation for all of them.
"""
import argparse
import json
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"error: no PyTorch ({error}): install one with CUDA, or bench without it", file=sys.stderr)
    sys.exit(2)

SIZES = {"d12": (12, 12, 768, 50304), "d48": (48, 25, 1600, 50304), "tiny": (2, 1, 64, 256)}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Layer(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.attproj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        batch, length, channels = x.shape
        q, k, v = (part.view(batch, length, self.heads, channels // self.heads).transpose(1, 2)
                   for part in self.qkv(self.ln1(x)).split(channels, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(batch, length, channels))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, channels, vocabulary, length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, channels), nn.Embedding(length, channels)
        self.layers = nn.ModuleList(Layer(channels, heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(channels)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def classify(self, x, targets):
        logits = self.lnf(x) @ self.wte.weight.T
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def compile(self):
        for layer in self.layers:
            layer.compile()
        self.classify = torch.compile(self.classify)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight
        for layer in self.layers:
            x = layer(x)
        return self.classify(x, targets)


class Trainer:
    def __init__(self, args):
        layers, heads, channels, vocabulary = SIZES[args.model]
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high")
        with torch.device(args.device):
            self.model = Gpt(layers, heads, channels, vocabulary, args.seq_len)
            tokens = torch.randint(vocabulary, (args.batch * args.seq_len + 1,))
        self.inputs = tokens[:-1].view(args.batch, args.seq_len)
        self.targets = tokens[1:].view(args.batch, args.seq_len)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8,
                                           weight_decay=0.0, fused=True)
        self.device = args.device
        self.model.compile()

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.model(self.inputs, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def milliseconds(self, steps):
        if self.device == "cpu":  # for trying this script without a GPU
            ends = [time.perf_counter()]
            for _ in range(steps):
                self.step()
                ends.append(time.perf_counter())
            return [1e3 * (end - begin) for begin, end in zip(ends, ends[1:])]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        ends[0].record()
        for end in ends[1:]:
            self.step()
            end.record()
        ends[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(ends, ends[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="d12")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--attention", choices=BACKENDS, default="flash")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: this PyTorch sees no GPU: install one with CUDA, or bench without it", file=sys.stderr)
        sys.exit(2)

    with sdpa_kernel(BACKENDS[args.attention]):
        trainer = Trainer(args)
        for _ in range(3):  # compiles and warms up
            trainer.step()
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(json.dumps({"pytorch": torch.__version__, "attention": args.attention, "parameters": parameters,
                          "batch": args.batch, "seq_len": args.seq_len}), flush=True)
        for line in sys.stdin:
            print(*(f"{value:.6f}" for value in trainer.milliseconds(int(line))), flush=True)


if __name__ == "__main__":
    main()
