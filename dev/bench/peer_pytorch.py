#!/usr/bin/env python3
"""PyTorch's speed on bench_cpu's model, on the same CPU: eager and torch.compile, fp32 and bf16 autocast.

    dev/bench/peer_pytorch.py                       tokens/s of each way
    dev/bench/peer_pytorch.py --ours bench_cpu.txt  and, with bench_cpu's saved output, the ratios

A step is what bench_cpu's is: forward, backward, clipping by the global norm, AdamW (fused). Two threads
unless OMP_NUM_THREADS says otherwise. torch.compile takes about a minute before its first step.
"""
import argparse
import os
import re
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

B, T, LAYERS, HEADS, CHANNELS, VOCABULARY = 8, 256, 6, 6, 384, 1024


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv, self.attproj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.fc, self.fcproj = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x):
        q, k, v = (part.view(B, T, HEADS, CHANNELS // HEADS).transpose(1, 2)
                   for part in self.qkv(self.ln1(x)).split(CHANNELS, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(B, T, CHANNELS))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, CHANNELS), nn.Embedding(T, CHANNELS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.lnf = nn.LayerNorm(CHANNELS)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.lnf(x) @ self.wte.weight.T
        return F.cross_entropy(logits.view(B * T, VOCABULARY), targets.view(B * T))


def tokens_per_second(compiled, bf16, steps):
    torch.manual_seed(1)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
                                  fused=True)
    tokens = torch.randint(VOCABULARY, (B * T + 1,))
    inputs, targets = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    loss_of = torch.compile(model) if compiled else model

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return B * T / statistics.median(seconds)


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def our_rates(path):
    """{'highest': tokens/s, 'medium': tokens/s} from bench_cpu's output."""
    row = re.compile(r"^(highest|medium)\s+(?:fp32|bf16, sums in fp32)\s+(\d+)", re.MULTILINE)
    try:
        with open(path) as file:
            rates = dict(row.findall(file.read()))
    except OSError as error:
        fail(f"cannot read {path} ({error.strerror}): save it with `build/bench_cpu | tee {path}`")
    if set(rates) != {"highest", "medium"}:
        fail(f"{path} is not the output of bench_cpu: save it with `build/bench_cpu | tee {path}`")
    return {word: float(rate) for word, rate in rates.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", help="a file with bench_cpu's output")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each way")
    args = parser.parse_args()
    ours = our_rates(args.ours) if args.ours else None  # before minutes of work
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))

    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads{'':27}tokens/s")
    best = {}
    for bf16 in (False, True):
        for compiled in (False, True):
            rate = tokens_per_second(compiled, bf16, args.steps)
            best[bf16] = max(rate, best.get(bf16, 0))
            name = f"{'torch.compile' if compiled else 'eager'}, {'bf16 autocast' if bf16 else 'fp32'}"
            print(f"         {name:44} {rate:8.0f}", flush=True)
    if ours:
        fp32, any_precision = best[False], max(best.values())
        print(f"highest  {ours['highest'] / fp32:.2f} x PyTorch's best in fp32")
        print(f"medium   {ours['medium'] / any_precision:.2f} x PyTorch's best")


if __name__ == "__main__":
    main()
