// The layers, by where they run: `layers::` is the CPU's functions or, with USE_CUDA, the kernels of the same
// names.
#pragma once
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/encoder.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/global_norm.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/memory.h"

namespace layers = cpu;
