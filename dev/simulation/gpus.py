"""What GPUs can do: each number with its source. For dev/tools/predict.py.

MATMUL   TFLOP/s of the fastest bf16 matmul that a search over shapes found: "Maximum Achievable Matmul FLOPS", means
         of 100 runs by PyTorch (S. Bekman, ml-engineering, compute/accelerator/README.md: A100 SXM 271.2, H100 SXM
         794.5, "H200 is the same")
COPY     TB/s read and written. A100: a kernel that scales an array (E. Hager's group, gpu-benches, scale at full
         occupancy: 1.732 with 80 GB, 1.381 with 40 GB). H100: 3.01, a softmax of 131,072 columns, 89.7% of the data
         sheet's (W. Guo, T. Zadouri, T. Dao, "Getting Memory-bound Kernels to Speed-of-Light", 2025). H200: no such
         measurement was found; the H100's share of its data sheet's 4.8
HOST     GB/s of a copy to pinned memory. A100 SXM: 25 (NVIDIA's developer forums, thread 352186, nvbandwidth of 8 GPUs;
         24 while others copy the other way). H100: 55.6 (NVIDIA's blog on nvbandwidth, p=115566; host to device)
LATENCY  clocks of a load from memory: gpu-benches, A100 80 GB 570 at 1410 MHz, H100 PCIe 655 at 1755 MHz
SDPA     TFLOP/s of attention in llm.c, which uses cuDNN: causal, heads of 64, T = 1024, counting half of the scores.
         H100: forward 263, backward 215, estimated from its kernels when issue 23 was written; J. Shah et al.
         (arXiv 2407.08608, figure 5) measure a newer cuDNN's forward at 288. A100: FLASH2
FLASH2   the same of FlashAttention-2, which has our algorithm and instructions. H100: 229 forward in that figure; its
         backward is published without a mask, 238, and is taken to lose as much by the mask as the forward, which has
         306 without. A100: these times the ratio of what mma.sync reaches on both
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    architecture: str   # of the figures of kernels
    sms: int            # data sheet
    peak: float         # flops a second, dense bf16, data sheet: llmc/mfu.h
    flops_a_clock: int  # of an SM's tensor cores in bf16: NVIDIA's architecture white papers
    matmul: float       # flops a second: MATMUL
    copy: float         # bytes a second: COPY
    host: float         # bytes a second: HOST
    latency: int        # clocks: LATENCY
    shared: int         # bytes of shared memory of an SM: CUDA C++ Programming Guide, technical specifications
    fuses_gelu: bool    # llmc/cuda/matmul.cuh: gains_from_fusing_gelu
    sdpa: tuple         # flops a second, forward and backward: SDPA
    flash2: tuple       # the same: FLASH2

    @property
    def clock(self):
        """Hz at which the data sheet's rate is reached."""
        return self.peak / (self.sms * self.flops_a_clock)


MMA_SHARE = 0.629  # of Hopper's peak, mma.sync: arXiv 2402.13499
A100_OF_H100 = 312 / (MMA_SHARE * 989.4)
FLASH2_H100 = (229e12, 238e12 * 229 / 306)
FLASH2_A100 = tuple(rate * A100_OF_H100 for rate in FLASH2_H100)
OF_H100, OF_A100 = ((263e12, 215e12), FLASH2_H100), (FLASH2_A100, FLASH2_A100)
TILE = (128, 256)  # of a matmul's output, either way: NVIDIA's "Matrix Multiplication Background User's Guide"

GPUS = {
    "h100": Gpu("H100 SXM, 80 GB", "sm_90", 132, 989.4e12, 4096, 794.5e12, 3.01e12, 55.6e9, 655, 228 << 10, True,
                *OF_H100),
    "h200": Gpu("H200 SXM", "sm_90", 132, 989.4e12, 4096, 794.5e12, 0.897 * 4.8e12, 55.6e9, 655, 228 << 10, True,
                *OF_H100),
    "a100": Gpu("A100 SXM, 80 GB", "sm_80", 108, 312e12, 2048, 271.2e12, 1.732e12, 25e9, 570, 164 << 10, False,
                *OF_A100),
    "a100-40": Gpu("A100 SXM, 40 GB", "sm_80", 108, 312e12, 2048, 271.2e12, 1.381e12, 25e9, 570, 164 << 10, False,
                   *OF_A100),
}

# Between two kernels of a stream: kernels of 2.9 us took 3.8 us each when launched one after the other on a V100
# (A. Gray, "Getting Started with CUDA Graphs", NVIDIA, 2019).
SECONDS_A_LAUNCH = 0.9e-6

# llm.c's kernels, as shares of a copy's speed: estimated from its sources when issue 23 was written, of a step of d12
# with B = 64 on an H100 (GELU 8.9 ms, residual + LayerNorm 3.9, LayerNorm backward 5.2, bias gradients 4.5,
# classifier 5.4). Nothing is known of them on other GPUs: they are taken to have the same share there.
LLMC_SHARES = {"GELU": 0.90, "residual + LayerNorm": 0.82, "LayerNorm backward": 0.62, "bias gradients": 0.80,
               "classifier": 0.81}

# What llm.c publishes, on each of eight GPUs: tokens/s, or MFU.
#   d12 on A100: 300 ms a step of 524,288 tokens (the head of its scripts/run_gpt2_124M.sh)
#   d12 on H100: 140 ms (modded-nanogpt, records/101324_llmc)
#   d48 on H100: 2.8 s a step of 1,048,576 tokens, -b 16 -d 1048576 -r 0 -ge 1 (its scripts/run_gpt2_1558M.sh)
LLMC_PUBLISHED = {("a100", "d12"): 524288 / 8 / 0.300, ("h100", "d12"): 524288 / 8 / 0.140,
                  ("h100", "d48"): 1048576 / 8 / 2.8}
