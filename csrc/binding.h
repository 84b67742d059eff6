// What the bindings share: checks, the instruction set in use, threads. Only csrc's own folder sees torch's headers.
//
// The checks and their words are those of epruntime/ops/checks.py. The interpreter's lock is released for the work;
// threads are torch's own (at::parallel_for), so that torch.set_num_threads holds here too.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace epruntime::binding {

using at::Tensor;
namespace py = pybind11;

// Registers matmul, bmm and grouped_matmul.
void define_gemm(py::module_& m);

inline const Kernels*& selected() {
    static const Kernels* kernels = supported_kernels().front();
    return kernels;
}

// Raises ValueError. `message` is put together only when the check fails.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
    if (condition) return;
    std::ostringstream message;
    (message << ... << parts);
    throw py::value_error(message.str());
}

inline std::string shown(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
            return "torch.float32";
        case at::kBFloat16:
            return "torch.bfloat16";
        case at::kHalf:
            return "torch.float16";
        case at::kDouble:
            return "torch.float64";
        case at::kInt:
            return "torch.int32";
        case at::kLong:
            return "torch.int64";
        default:
            return at::toString(dtype);
    }
}

// Type and place of x; its strides are free.
inline void check_strided(const char* op, const char* name, const Tensor& x, const std::vector<at::ScalarType>& dtypes,
                          int64_t dim) {
    if (std::find(dtypes.begin(), dtypes.end(), x.scalar_type()) == dtypes.end()) {
        std::string wanted;
        for (const at::ScalarType dtype : dtypes) wanted += (wanted.empty() ? "" : " or ") + shown(dtype);
        require(false, op, ": ", name, " is ", shown(x.scalar_type()), ", must be ", wanted);
    }
    require(x.dim() == dim, op, ": ", name, " has ", x.dim(), " dimensions, must have ", dim);
    require(x.device().is_cpu(), op, ": ", name, " is on ", x.device(), ", must be on cpu");
}

// And its last dimension is contiguous.
inline void check(const char* op, const char* name, const Tensor& x, const std::vector<at::ScalarType>& dtypes,
                  int64_t dim) {
    check_strided(op, name, x, dtypes, dim);
    require(x.size(-1) <= 1 || x.stride(-1) == 1, op, ": the last dimension of ", name, " is not contiguous (stride ",
            x.stride(-1), ")");
}

inline const std::vector<at::ScalarType> kFloats = {at::kFloat, at::kBFloat16};

inline DType dtype_of(const Tensor& x) {
    return x.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
}

// A thread's scratch memory, kept between calls: fresh pages would cost more than the work of a small step.
inline float* thread_scratch(size_t floats) {
    struct Release {
        void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    thread_local std::unique_ptr<float[], Release> memory;
    thread_local size_t capacity = 0;
    if (capacity < floats) {
        memory.reset(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(64))));
        capacity = floats;
    }
    return memory.get();
}

// work(i) for every i < count, handed out one by one to torch's threads; on this thread alone if `small`.
template <typename Work>
void for_each(int64_t count, bool small, const Work& work) {
    const int64_t threads = small ? 1 : std::min<int64_t>(at::get_num_threads(), count);
    std::atomic<int64_t> next{0};
    const auto take = [&](int64_t, int64_t) {
        for (int64_t i = next++; i < count; i = next++) work(i);
    };
    if (threads <= 1)
        take(0, 1);
    else
        at::parallel_for(0, threads, 1, take);
}

}  // namespace epruntime::binding
