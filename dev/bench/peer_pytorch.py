#!/usr/bin/env python3
"""PyTorch's training step on a GPT-2 as dev/bench/bench_cpu.py measures it, in one of its ways.

    dev/bench/peer_pytorch.py --layers 6 --heads 6 --channels 384 --vocabulary 1024 -t 256 -b 8 --compile --bf16

It prints "ready" after three steps, which compile what is compiled. Then each line of its input is a number of steps,
which it times, and it answers in JSON: the median of their seconds, and the peak of its memory in bytes. A step is
what the trainer's is: forward, backward, clipping by the global norm, AdamW (fused), and the loss on the host. Two
threads unless OMP_NUM_THREADS says otherwise. --compile takes about a minute.
"""
import argparse
import json
import os
import resource
import statistics
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError:
    print("error: PyTorch is missing: make bench-cpu PEERS=1 installs it and runs this", file=sys.stderr)
    sys.exit(2)


class Layer(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.attproj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for part in self.qkv(self.ln1(x)).split(C, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, channels, vocabulary, sequence):
        super().__init__()
        padded = -(-vocabulary // 128) * 128  # faster than 50257
        self.wte, self.wpe = nn.Embedding(padded, channels), nn.Embedding(sequence, channels)
        self.layers = nn.ModuleList(Layer(channels, heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(channels)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.lnf(x) @ self.wte.weight.T
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def make_step(arguments):
    torch.manual_seed(1)
    B, T = arguments.batch, arguments.sequence
    model = Gpt(arguments.layers, arguments.heads, arguments.channels, arguments.vocabulary, T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
                                  fused=True)
    tokens = torch.randint(arguments.vocabulary, (B * T + 1,))
    inputs, targets = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    loss_of = torch.compile(model) if arguments.compile else model

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
            loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--layers", "--heads", "--channels", "--vocabulary"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("-t", dest="sequence", type=int, required=True)
    parser.add_argument("-b", dest="batch", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    step = make_step(arguments)
    for _ in range(3):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": statistics.median(seconds), "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
