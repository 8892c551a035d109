// Tensor cores' instructions as operations of a whole warp: ldmatrix and mma.m16n8k16, whose layouts
// llmc/cuda/device.cuh describes.
#pragma once
#include "dev/emulator/emulator.h"

namespace emulator {

// Lane i brings row i % 8 of matrix i / 8; register m of lane t gets two elements of matrix m.
template <bool transposed>
void load_matrix_x4(uint32_t (&registers)[4], const void* row, Site site) {
    check_aligned(row, 16, site);
    if (!is_shared(row, 16)) { fail("ldmatrix from an address that is not in shared memory", site); }
    struct Operand {
        uint16_t row[8];
        uint32_t* registers;
    } own;
    for (int i = 0; i < 8; i++) { own.row[i] = static_cast<const uint16_t*>(row)[i]; }
    own.registers = registers;
    warp_operation(
        transposed ? "ldmatrix.x4.trans" : "ldmatrix.x4", ~0u, &own,
        [](Operands lanes) {
            auto element = [&](int matrix, int i, int j) {
                return uint32_t(static_cast<const Operand*>(lanes[8 * matrix + (transposed ? j : i)])
                                    ->row[transposed ? i : j]);
            };
            for (int t = 0; t < 32; t++) {
                for (int m = 0; m < 4; m++) {
                    const int i = t / 4, j = t % 4 * 2;
                    static_cast<Operand*>(lanes[t])->registers[m] = element(m, i, j) | element(m, i, j + 1)
                                                                                           << 16;
                }
            }
        },
        site);
}

inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

struct MmaOperand {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};

// Gathers both matrices from the lanes' registers, and gives each lane its part of their product.
inline void mma_m16n8k16(Operands lanes) {
    float a[16][16], b[16][8], product[16][8] = {};
    for (int t = 0; t < 32; t++) {
        const MmaOperand& lane = *static_cast<const MmaOperand*>(lanes[t]);
        const int group = t / 4, pair = t % 4 * 2;
        for (int r = 0; r < 4; r++) {
            a[group + r % 2 * 8][pair + r / 2 * 8] = low_bf16(lane.a[r]);
            a[group + r % 2 * 8][pair + r / 2 * 8 + 1] = high_bf16(lane.a[r]);
        }
        for (int r = 0; r < 2; r++) {
            b[pair + r * 8][group] = low_bf16(lane.b[r]);
            b[pair + r * 8 + 1][group] = high_bf16(lane.b[r]);
        }
    }
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < 16; k++) {
            for (int j = 0; j < 8; j++) { product[i][j] += a[i][k] * b[k][j]; }
        }
    }
    for (int t = 0; t < 32; t++) {
        for (int r = 0; r < 4; r++) {
            static_cast<const MmaOperand*>(lanes[t])->c[r] += product[t / 4 + r / 2 * 8][t % 4 * 2 + r % 2];
        }
    }
}

}  // namespace emulator
