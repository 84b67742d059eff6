// The kernels of one instruction set, and the choice among those that this machine can run.
//
// kernels_*.cpp each compile the same *_kernel.h files with their own flags. Inside those files everything lives in an
// unnamed namespace, and nothing from the standard library that the linker could share: it would keep one copy for
// all, perhaps the one made for a newer CPU.
#pragma once

#include <cstddef>
#include <vector>

#include "common/types.h"

namespace epruntime {

struct Kernels {
    const char* name;
    size_t (*attention_scratch_floats)(const AttentionArgs& args);
    // scratch: 64-byte aligned.
    void (*attention_unit)(const AttentionArgs& args, const AttentionUnit& unit, float* scratch);
    void (*combine)(const CombineArgs& args, int64_t first_token, int64_t last_token);
    size_t (*gemm_scratch_floats)(const GemmArgs& args, const GemmUnit& unit);
    void (*gemm_unit)(const GemmArgs& args, const GemmUnit& unit, float* scratch);  // scratch: 64-byte aligned.
};

extern const Kernels kPortableKernels;
#ifdef EPRUNTIME_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;
#endif

// All that this CPU and its operating system can run, the best first.
std::vector<const Kernels*> supported_kernels();

}  // namespace epruntime
