// Compiled for any CPU of the target architecture.
#define EPRUNTIME_SIMD_PORTABLE
#include "cpu/attention_kernel.h"
#include "cpu/combine_kernel.h"
#include "cpu/gemm_kernel.h"
#include "cpu/kernels.h"

const epruntime::Kernels epruntime::kPortableKernels = {"portable", attention_scratch_floats, attention_unit,
                                                        combine,    gemm_scratch_floats,      gemm_unit};
