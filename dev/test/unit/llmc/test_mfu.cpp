// Model flops utilization: flops of a token by hand, and the rates of GPUs by the names that drivers report.
#include "llmc/mfu.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace test_mfu {

// GPT-2 124M: 6 * 124475904 and 6 * 12 * 768 * 1024, as llm.c counts them.
TEST(Mfu, flops_of_a_token_are_those_of_parameters_and_attention) {
    EXPECT_EQ(model_flops_per_token({1024, 50257, 50304, 12, 12, 768}, 124475904, 1024), 803478528.0);
    EXPECT_EQ(model_flops_per_token({64, 250, 256, 2, 1, 64}, 1000, 32), 6000.0 + 6 * 2 * 64 * 32);
}

TEST(Mfu, flops_of_a_large_model_do_not_overflow) {
    const long parameters = 100L << 32;
    EXPECT_EQ(model_flops_per_token({1 << 20, 50257, 50304, 1000, 128, 16384}, parameters, 1 << 20),
              6.0 * double(parameters) + 6.0 * 1000 * 16384 * 1048576);
}

TEST(Mfu, a_gpu_has_the_dense_rate_of_its_data_sheet) {
    EXPECT_EQ(peak_flops("NVIDIA H200", true), 989.4e12);
    EXPECT_EQ(peak_flops("NVIDIA H200 NVL", true), 835.5e12);
    EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3", true), 989.4e12);
    EXPECT_EQ(peak_flops("NVIDIA H100 PCIe", true), 756e12);
    EXPECT_EQ(peak_flops("NVIDIA GH200 480GB", true), 989.4e12);
    EXPECT_EQ(peak_flops("NVIDIA B200", true), 2250e12);
    EXPECT_EQ(peak_flops("NVIDIA GB200", true), 2500e12);
    EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", true), 312e12);
    EXPECT_EQ(peak_flops("A100-SXM4-40GB", true), 312e12);  // as drivers had it until 2021
    EXPECT_EQ(peak_flops("NVIDIA GeForce RTX 4090", true), 165.2e12);
    EXPECT_EQ(peak_flops("NVIDIA L40S", true), 362.05e12);
}

TEST(Mfu, an_fp32_build_is_compared_with_what_its_matmuls_use) {
    for (MatmulPrecision tf32 : {MatmulPrecision::medium, MatmulPrecision::high}) {
        EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", false, tf32), 156e12);
    }
    EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", false, MatmulPrecision::highest), 19.5e12);
    EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", true, MatmulPrecision::highest), 312e12);
}

// Another GPU, or a part of one, has no rate, however similar its name is.
TEST(Mfu, the_rate_of_a_gpu_that_is_not_known_is_not_invented) {
    for (const char* name : {"", "CPU", "emulated GPU", "NVIDIA", "NVIDIA ", "NVIDIA A10G", "NVIDIA A1",
                             "NVIDIA GB10", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
                             "NVIDIA A40-48Q", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090 Laptop GPU",
                             "NVIDIA GeForce RTX 4090 D", "NVIDIA NVIDIA H200", "AMD Instinct MI300X"}) {
        EXPECT_EQ(peak_flops(name, true), std::nullopt) << name;
        EXPECT_EQ(peak_flops(name, false), std::nullopt) << name;
    }
}

// A rate with sparsity, or from the wrong column, would stand out: tensor cores of all these GPUs are twice
// as fast in bf16 as in TF32 (data sheets round), and in TF32 no slower than the other cores in fp32.
TEST(Mfu, the_rates_of_a_gpu_fit_together) {
    std::set<std::string> names;
    for (const GpuRates& rates : gpu_rates) {
        EXPECT_TRUE(names.insert(rates.name).second) << rates.name << " is there twice";
        EXPECT_NE(std::string(rates.name).rfind("NVIDIA", 0), 0u) << rates.name;
        EXPECT_NEAR(rates.bf16 / rates.tf32, 2, 0.06) << rates.name;
        EXPECT_GE(rates.tf32, rates.fp32) << rates.name;
    }
}

}  // namespace test_mfu
