// Compiled with AVX-512 F, BW, DQ, VL and BF16 (setup.py, ISA_FLAGS).
#define EPRUNTIME_SIMD_AVX512
#define EPRUNTIME_SIMD_BF16
#include "cpu/attention_kernel.h"
#include "cpu/combine_kernel.h"
#include "cpu/gemm_kernel.h"
#include "cpu/kernels.h"

const epruntime::Kernels epruntime::kAvx512Bf16Kernels = {"avx512_bf16", attention_scratch_floats, attention_unit,
                                                          combine,       gemm_scratch_floats,      gemm_unit};
