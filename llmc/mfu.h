// Model flops utilization: the flops that a model's equations need, over the peak that the GPU's data
// sheet states. A token takes
//
//     6 N + 6 L C T        N: all parameters, with positions and the vocabulary's padding
//
// as llm.c counts (PaLM's count, arXiv 2204.02311, appendix B, halved for causal attention): two flops a
// parameter in the forward and four in the backward, the same per multiplication in attention, and none for
// recomputation. A GPU that is not in the table has no MFU, nor has a part of a GPU (MIG) or the CPU. A clock
// below the data sheet's shows as a lower MFU.
#pragma once
#include <optional>
#include <string>

#include "llmc/floatx.h"
#include "llmc/layout.h"

// T: tokens in a sequence
inline double model_flops_per_token(const GptShape& shape, long parameters, int T) {
    return 6.0 * double(parameters) + 6.0 * shape.layers * shape.channels * double(T);
}

// Dense TFLOP/s at the boost clock: tensor cores on bf16 and TF32 with sums in fp32, and fp32 without tensor
// cores. If the source states rates with sparsity, these are half of them.
struct GpuRates {
    const char* name;  // as in cudaGetDeviceProperties, without the leading "NVIDIA "
    double bf16, tf32, fp32;
};

// GB10 (DGX Spark) is missing, since NVIDIA publishes only its fp4 rate, and so are GPUs before the A100,
// which the kernels do not support.
constexpr GpuRates gpu_rates[] = {
    // A100 data sheet (June 2021)
    {"A100-SXM4-40GB", 312, 156, 19.5},
    {"A100-SXM4-80GB", 312, 156, 19.5},
    {"A100-PCIE-40GB", 312, 156, 19.5},
    {"A100-PCIE-80GB", 312, 156, 19.5},
    {"A100 80GB PCIe", 312, 156, 19.5},
    // A30, A40 and A10 data sheets
    {"A30", 165, 82, 10.3},
    {"A40", 149.7, 74.8, 37.4},
    {"A10", 125, 62.5, 31.2},
    // "NVIDIA Ampere GA102 GPU Architecture" (white paper, v2), GeForce RTX 30 and RTX A6000; 3090 Ti: its
    // cores and clock on NVIDIA's page
    {"GeForce RTX 3090", 71.2, 35.6, 35.6},
    {"GeForce RTX 3090 Ti", 80, 40, 40},
    {"RTX A6000", 154.8, 77.4, 38.7},
    // L4, L40 and L40S data sheets
    {"L4", 121, 60, 30.3},
    {"L40", 181.05, 90.5, 90.5},
    {"L40S", 362.05, 183, 91.6},
    // "NVIDIA Ada GPU Architecture" (white paper, v2)
    {"GeForce RTX 4080", 97.5, 48.7, 48.7},
    {"GeForce RTX 4090", 165.2, 82.6, 82.6},
    {"RTX 6000 Ada Generation", 364.2, 182.1, 91.1},
    // "NVIDIA H100 Tensor Core GPU Architecture" (white paper, v1.04), SXM5 and PCIe; H100 data sheet: NVL
    {"H100 80GB HBM3", 989.4, 494.7, 66.9},
    {"H100 PCIe", 756, 378, 51.2},
    {"H100 NVL", 835.5, 417.5, 60},
    // H200 and GH200 data sheets: the H100's processors
    {"H200", 989.4, 494.7, 66.9},
    {"H200 NVL", 835.5, 417.5, 60},
    {"GH200 120GB", 989.4, 494.7, 66.9},
    {"GH200 480GB", 989.4, 494.7, 66.9},
    {"GH200 144G HBM3e", 989.4, 494.7, 66.9},
    // "NVIDIA Blackwell Architecture Technical Brief": HGX B100; Blackwell data sheet: HGX B200 and GB200, a
    // GPU; HGX B300 and GB300 NVL72 data sheets: an eighth and a 72nd
    {"B100", 1750, 900, 60},
    {"B200", 2250, 1100, 75},
    {"GB200", 2500, 1250, 80},
    {"B300 SXM6 AC", 2250, 1125, 75},
    {"GB300", 2500, 1250, 80},
    // "NVIDIA RTX Blackwell GPU Architecture" and "NVIDIA RTX Blackwell PRO GPU Architecture" (white papers)
    {"GeForce RTX 5080", 112.6, 56.3, 56.3},
    {"GeForce RTX 5090", 209.5, 104.8, 104.8},
    {"RTX PRO 6000 Blackwell Workstation Edition", 503.8, 251.9, 126},
};

// The peak flops per second of the trainer's matmuls on a GPU of this name: in bf16 or, in an fp32 build,
// in the given precision. Nothing for an unknown GPU.
inline std::optional<double> peak_flops(const std::string& gpu_name, bool bf16,
                                        MatmulPrecision precision = MatmulPrecision::medium) {
    const std::string maker = "NVIDIA ";  // older drivers leave it out
    const std::string name = gpu_name.rfind(maker, 0) == 0 ? gpu_name.substr(maker.size()) : gpu_name;
    for (const GpuRates& rates : gpu_rates) {
        if (name != rates.name) { continue; }
        const double fp32 = precision == MatmulPrecision::highest ? rates.fp32 : rates.tf32;
        return 1e12 * (bf16 ? rates.bf16 : fp32);
    }
    return std::nullopt;
}
