// Python's side of matrix products: argument checks, copies of what lies in no usable order, the output.

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>
#include <vector>

#include "binding.h"
#include "cpu/gemm_plan.h"

namespace epruntime::binding {

namespace {

void check_factors(const char* op, const char* a_name, const char* b_name, const Tensor& a, const Tensor& b,
                   int64_t a_dim, int64_t b_dim) {
    check_strided(op, a_name, a, kFloats, a_dim);
    check_strided(op, b_name, b, {a.scalar_type()}, b_dim);
    require(a.size(-1) == b.size(-2), op, ": ", a_name, " is ", a.sizes(), ", ", b_name, " ", b.sizes());
}

// Rows made contiguous, if they are not.
Tensor with_whole_rows(const Tensor& a) {
    return a.size(-1) <= 1 || a.stride(-1) == 1 ? a : a.contiguous();
}

// Columns or rows made contiguous, if neither are.
Tensor with_whole_lines(const Tensor& b) {
    const bool whole = b.size(-2) <= 1 || b.stride(-2) == 1 || b.size(-1) <= 1 || b.stride(-1) == 1;
    return whole ? b : b.contiguous();
}

// Arguments of products with matrices like b; a's rows are contiguous, and so are b's columns or rows.
GemmArgs arguments(const Tensor& a, const Tensor& b, const Tensor& out) {
    GemmArgs args{};
    args.dtype = dtype_of(a);
    args.columns = b.size(-1);
    args.depth = b.size(-2);
    args.a_row_stride = a.stride(-2);
    args.b_row_major = args.depth > 1 && b.stride(-2) != 1;
    args.b_stride = args.b_row_major ? b.stride(-2) : b.stride(-1);
    args.out_row_stride = out.stride(-2);
    return args;
}

void multiply(const GemmArgs& args, const std::vector<GemmUnit>& products) {
    int64_t rows = 0;
    for (const GemmUnit& product : products) rows += product.num_rows;
    const bool small = rows * args.columns * std::max<int64_t>(1, args.depth) < 100000;  // about 10 us on one core
    const std::vector<GemmUnit> units = plan_gemm(args, products, small ? 1 : at::get_num_threads());
    const Kernels& kernels = *selected();
    for_each(static_cast<int64_t>(units.size()), small, [&](int64_t i) {
        const GemmUnit& unit = units[static_cast<size_t>(i)];
        kernels.gemm_unit(args, unit, thread_scratch(kernels.gemm_scratch_floats(args, unit)));
    });
}

const char* element(const Tensor& x, int64_t offset) {
    return static_cast<const char*>(x.const_data_ptr()) + offset * x.element_size();
}

char* mutable_element(const Tensor& x, int64_t offset) {
    return static_cast<char*>(x.mutable_data_ptr()) + offset * x.element_size();
}

Tensor matmul(const Tensor& a_any, const Tensor& b_any, const std::optional<Tensor>& bias_any) {
    const char* op = "matmul";
    check_factors(op, "a", "b", a_any, b_any, 2, 2);
    std::optional<Tensor> bias;
    if (bias_any) {
        if (a_any.scalar_type() == at::kFloat)
            check_strided(op, "bias", *bias_any, {at::kFloat}, 1);
        else
            check_strided(op, "bias", *bias_any, {a_any.scalar_type(), at::kFloat}, 1);
        require(bias_any->size(0) == b_any.size(1), op, ": bias has ", bias_any->size(0), " elements for ",
                b_any.size(1), " columns");
    }
    const py::gil_scoped_release unlocked;
    if (bias_any) bias = bias_any->to(at::kFloat).contiguous();
    const Tensor a = with_whole_rows(a_any), b = with_whole_lines(b_any);
    Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
    const GemmUnit product = {a.const_data_ptr(),
                              b.const_data_ptr(),
                              bias ? bias->const_data_ptr<float>() : nullptr,
                              out.mutable_data_ptr(),
                              a.size(0),
                              0,
                              b.size(1)};
    multiply(arguments(a, b, out), {product});
    return out;
}

Tensor bmm(const Tensor& a_any, const Tensor& b_any) {
    const char* op = "bmm";
    check_factors(op, "a", "b", a_any, b_any, 3, 3);
    require(a_any.size(0) == b_any.size(0), op, ": a is ", a_any.sizes(), ", b ", b_any.sizes());
    const py::gil_scoped_release unlocked;
    const Tensor a = with_whole_rows(a_any), b = with_whole_lines(b_any);
    Tensor out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
    std::vector<GemmUnit> products;
    for (int64_t i = 0; i < a.size(0); ++i)
        products.push_back({element(a, i * a.stride(0)), element(b, i * b.stride(0)), nullptr,
                            mutable_element(out, i * out.stride(0)), a.size(1), 0, b.size(2)});
    multiply(arguments(a, b, out), products);
    return out;
}

Tensor grouped_matmul(const Tensor& x_any, const Tensor& matrix_any, const Tensor& ends) {
    const char* op = "grouped_matmul";
    check_factors(op, "x", "matrix", x_any, matrix_any, 2, 3);
    check(op, "ends", ends, {at::kInt}, 1);
    const int64_t groups = matrix_any.size(0);
    require(ends.size(0) == groups, op, ": ", ends.size(0), " ends for ", groups, " matrices");
    const int32_t* end = ends.const_data_ptr<int32_t>();
    for (int64_t s = 0, before = 0; s < groups; before = end[s++])
        require(before <= end[s], op, ": ends[", s, "] = ", end[s], " is less than the one before, ", before);
    const int64_t used = groups ? end[groups - 1] : 0;
    require(used <= x_any.size(0), op, ": ends[", groups - 1, "] = ", used, ", but x has ", x_any.size(0), " rows");
    const py::gil_scoped_release unlocked;
    const Tensor x = with_whole_rows(x_any), matrix = with_whole_lines(matrix_any);
    Tensor out = at::empty({x.size(0), matrix.size(2)}, x.options());
    if (used < x.size(0)) out.slice(0, used).zero_();
    std::vector<GemmUnit> products;
    for (int64_t s = 0, start = 0; s < groups; start = end[s++])
        if (start < end[s])
            products.push_back({element(x, start * x.stride(0)), element(matrix, s * matrix.stride(0)), nullptr,
                                mutable_element(out, start * out.stride(0)), end[s] - start, 0, matrix.size(2)});
    multiply(arguments(x, matrix, out), products);
    return out;
}

}  // namespace

void define_gemm(py::module_& m) {
    m.def("matmul", &matmul);
    m.def("bmm", &bmm);
    m.def("grouped_matmul", &grouped_matmul);
}

}  // namespace epruntime::binding
