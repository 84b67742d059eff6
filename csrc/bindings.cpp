// The Python module epruntime._C: registration and argument checks (products: gemm_binding.cpp).

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "binding.h"
#include "common/progress.h"
#include "cpu/attention_plan.h"
#include "cpu/rows.h"

namespace {

using at::Tensor;
namespace py = pybind11;
using namespace epruntime::binding;

epruntime::PagedView paged_view(const Tensor& cache) {
    return {cache.const_data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2), cache.size(3)};
}

void write_kv_cache(const Tensor& x, const Tensor& cache, const Tensor& slots) {
    const char* op = "write_kv_cache";
    check(op, "x", x, kFloats, 3);
    check(op, "cache", cache, {x.scalar_type()}, 4);
    check(op, "slots", slots, {at::kLong}, 1);
    require(x.sizes().slice(1) == cache.sizes().slice(2), op, ": rows of x are ", x.sizes().slice(1), ", of cache ",
            cache.sizes().slice(2));
    require(slots.size(0) == x.size(0), op, ": x has ", x.size(0), " rows, slots ", slots.size(0));
    const int64_t rows = x.size(0), size = cache.size(0) * cache.size(1), bytes = x.element_size();
    const int64_t* slot = slots.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < rows; ++t)
        require(-1 <= slot[t] && slot[t] < size, op, ": slots[", t, "] = ", slot[t], " is outside the cache of ", size,
                " slots");
    const epruntime::CacheWrite args = {static_cast<const char*>(x.const_data_ptr()),
                                        x.stride(0) * bytes,
                                        x.stride(1) * bytes,
                                        static_cast<char*>(cache.mutable_data_ptr()),
                                        cache.stride(0) * bytes,
                                        cache.stride(1) * bytes,
                                        cache.stride(2) * bytes,
                                        x.size(1),
                                        x.size(2) * bytes,
                                        cache.size(1),
                                        slot};
    const py::gil_scoped_release unlocked;
    const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, x.size(1) * x.size(2) * bytes));
    at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) { write_kv_rows(args, first, last); });
}

// Block numbers that a query can reach must lie in the cache; those before every query's window may be gone.
void check_tables(const char* op, const epruntime::AttentionArgs& args, int64_t rows, int64_t num_blocks,
                  int64_t columns) {
    require(args.query_starts[0] == 0, op, ": query_starts[0] = ", args.query_starts[0], ", must be 0");
    const int64_t last = args.query_starts[args.num_seqs];
    require(last <= rows, op, ": query_starts[", args.num_seqs, "] = ", last, ", but q has ", rows, " rows");
    for (int64_t s = 0; s < args.num_seqs; ++s) {
        const int64_t start = args.query_starts[s], queries = args.query_starts[s + 1] - start;
        const int64_t length = args.seq_lens[s];
        require(queries >= 0, op, ": query_starts[", s + 1, "] = ", args.query_starts[s + 1],
                " is less than the one before, ", start);
        if (queries == 0) continue;
        require(length >= queries, op, ": seq_lens[", s, "] = ", length, ", but the sequence has ", queries,
                " queries");
        const int64_t position = length - queries, needed = (length - 1) / args.block_size + 1;
        require(needed <= columns, op, ": seq_lens[", s, "] = ", length, " needs ", needed,
                " blocks, block_tables has ", columns, " columns");
        int64_t first = 0;
        if (args.window) first = std::max(first, position - args.window + 1);
        if (args.chunk) first = std::max(first, position / args.chunk * args.chunk);
        for (int64_t b = first / args.block_size; b < needed; ++b) {
            const int64_t block = args.block_tables[s * args.table_stride + b];
            require(0 <= block && block < num_blocks, op, ": block_tables[", s, ", ", b, "] = ", block,
                    " is outside the cache of ", num_blocks, " blocks");
        }
    }
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                       const Tensor& query_starts, const Tensor& seq_lens, double scale, int64_t window, int64_t chunk,
                       double softcap, const std::optional<Tensor>& sinks) {
    const char* op = "paged_attention";
    check(op, "q", q, kFloats, 3);
    check(op, "k_cache", k_cache, {q.scalar_type()}, 4);
    check(op, "v_cache", v_cache, {q.scalar_type()}, 4);
    check(op, "block_tables", block_tables, {at::kInt}, 2);
    check(op, "query_starts", query_starts, {at::kInt}, 1);
    check(op, "seq_lens", seq_lens, {at::kInt}, 1);
    require(k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3), op, ": k_cache is ", k_cache.sizes(),
            ", v_cache ", v_cache.sizes(), "; blocks, slots and heads must agree");
    require(q.size(2) == k_cache.size(3), op, ": q has head size ", q.size(2), ", k_cache ", k_cache.size(3));
    const int64_t num_heads = q.size(1), num_kv_heads = k_cache.size(2), num_seqs = seq_lens.size(0);
    require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, op, ": ", num_heads,
            " query heads are not a multiple of ", num_kv_heads, " KV heads");
    require(window >= 0, op, ": window = ", window, " is negative");
    require(chunk >= 0, op, ": chunk = ", chunk, " is negative");
    require(softcap >= 0, op, ": softcap = ", softcap, " is negative");
    if (sinks) {
        check(op, "sinks", *sinks, {at::kFloat}, 1);
        require(sinks->size(0) == num_heads, op, ": ", sinks->size(0), " sinks for ", num_heads, " query heads");
    }
    require(query_starts.size(0) == num_seqs + 1, op, ": ", query_starts.size(0), " query_starts for ", num_seqs,
            " seq_lens");
    require(block_tables.size(0) == num_seqs, op, ": ", block_tables.size(0), " block_tables for ", num_seqs,
            " seq_lens");

    Tensor out = at::empty({q.size(0), num_heads, v_cache.size(3)}, q.options());
    epruntime::AttentionArgs args{};
    args.dtype = dtype_of(q);
    args.q = q.const_data_ptr();
    args.q_row_stride = q.stride(0);
    args.q_head_stride = q.stride(1);
    args.out = out.mutable_data_ptr();
    args.keys = paged_view(k_cache);
    args.values = paged_view(v_cache);
    args.block_size = k_cache.size(1);
    args.num_heads = num_heads;
    args.num_kv_heads = num_kv_heads;
    args.num_seqs = num_seqs;
    args.block_tables = block_tables.const_data_ptr<int32_t>();
    args.table_stride = block_tables.stride(0);
    args.query_starts = query_starts.const_data_ptr<int32_t>();
    args.seq_lens = seq_lens.const_data_ptr<int32_t>();
    args.window = window;
    args.chunk = chunk;
    args.scale = static_cast<float>(scale);
    args.softcap = static_cast<float>(softcap);
    args.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
    check_tables(op, args, q.size(0), k_cache.size(0), block_tables.size(1));

    const py::gil_scoped_release unlocked;
    const int64_t used = args.query_starts[num_seqs];
    if (used < q.size(0)) out.slice(0, used).zero_();
    const std::vector<epruntime::AttentionUnit> units = epruntime::plan_attention(args);
    const epruntime::Kernels& kernels = *selected();
    const size_t scratch = kernels.attention_scratch_floats(args);
    int64_t products = 0;  // q . k, about
    for (const auto& unit : units) products += unit.num_rows * args.seq_lens[unit.seq];
    const bool small = products * (args.keys.size + args.values.size) < 200000;  // under 20 us on one core
    for_each(static_cast<int64_t>(units.size()), small,
             [&](int64_t i) { kernels.attention_unit(args, units[static_cast<size_t>(i)], thread_scratch(scratch)); });
    return out;
}

Tensor combine_rows(const Tensor& rows, const Tensor& index, const Tensor& weights) {
    const char* op = "combine_rows";
    check(op, "rows", rows, kFloats, 2);
    check(op, "index", index, {at::kInt}, 2);
    check(op, "weights", weights, {at::kFloat}, 2);
    require(index.sizes() == weights.sizes(), op, ": index is ", index.sizes(), ", weights ", weights.sizes());
    const Tensor index_whole = index.contiguous(), weights_whole = weights.contiguous();
    const int64_t tokens = index.size(0), choices = index.size(1), hidden = rows.size(1);
    const int32_t* row = index_whole.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < tokens * choices; ++i)
        require(-1 <= row[i] && row[i] < rows.size(0), op, ": index[", i / choices, ", ", i % choices, "] = ", row[i],
                " is outside the ", rows.size(0), " rows");
    Tensor out = at::empty({tokens, hidden}, rows.options());
    const epruntime::CombineArgs args = {dtype_of(rows),
                                         rows.const_data_ptr(),
                                         rows.stride(0),
                                         row,
                                         weights_whole.const_data_ptr<float>(),
                                         out.mutable_data_ptr(),
                                         choices,
                                         hidden};
    const py::gil_scoped_release unlocked;
    const epruntime::Kernels& kernels = *selected();
    const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, choices * hidden));
    at::parallel_for(0, tokens, grain, [&](int64_t first, int64_t last) { kernels.combine(args, first, last); });
    return out;
}

Tensor pack_rows(const Tensor& x, const Tensor& token, const Tensor& slots, int64_t slots_at, int64_t row_bytes) {
    const char* op = "pack_rows";
    check(op, "x", x, kFloats, 2);
    check(op, "token", token, {at::kLong}, 1);
    check(op, "slots", slots, {at::kInt}, 2);
    const int64_t rows = token.size(0), hidden_bytes = x.size(1) * x.element_size(), slots_bytes = 4 * slots.size(1);
    require(rows == slots.size(0), op, ": ", rows, " tokens for ", slots.size(0), " rows of slots");
    require(slots_at >= hidden_bytes && slots_at % 4 == 0, op, ": slots_at = ", slots_at,
            " must be a multiple of 4 and leave room for ", hidden_bytes, " bytes of x");
    require(row_bytes >= slots_at + slots_bytes, op, ": row_bytes = ", row_bytes, ", but the slots end at ",
            slots_at + slots_bytes);
    const int64_t* from = token.const_data_ptr<int64_t>();
    for (int64_t n = 0; n < rows; ++n)
        require(0 <= from[n] && from[n] < x.size(0), op, ": token[", n, "] = ", from[n], " is outside the ", x.size(0),
                " rows of x");
    Tensor message = at::empty({rows, row_bytes}, x.options().dtype(at::kByte));
    const epruntime::RowPack args = {static_cast<const char*>(x.const_data_ptr()),
                                     x.stride(0) * x.element_size(),
                                     hidden_bytes,
                                     from,
                                     static_cast<const char*>(slots.const_data_ptr()),
                                     slots.stride(0) * 4,
                                     slots_bytes,
                                     slots_at,
                                     row_bytes,
                                     static_cast<char*>(message.mutable_data_ptr())};
    const py::gil_scoped_release unlocked;
    const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, row_bytes));
    at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) { epruntime::pack_rows(args, first, last); });
    return message;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const epruntime::Kernels* kernels : epruntime::supported_kernels()) names.emplace_back(kernels->name);
    return names;
}

void select_isa(const std::string& name) {
    for (const epruntime::Kernels* kernels : epruntime::supported_kernels())
        if (name == kernels->name) {
            selected() = kernels;
            return;
        }
    require(false, "select_isa: this CPU and build cannot run '", name, "'");
}

// A ProgressPublisher, and the Python buffer whose memory it reads.
class Publisher {
  public:
    Publisher(int fd, const py::buffer& cells, const py::bytes& frame, double interval_s) : cells_(cells.request()) {
        const std::string whole = frame;
        const size_t bytes = static_cast<size_t>(cells_.size * cells_.itemsize);
        require(bytes % sizeof(int64_t) == 0 && reinterpret_cast<uintptr_t>(cells_.ptr) % alignof(int64_t) == 0,
                "ProgressPublisher: the cells are no aligned int64");
        require(whole.size() >= bytes, "ProgressPublisher: a frame of ", whole.size(), " bytes has no room for ", bytes,
                " of stamps");
        require(fd >= 0, "ProgressPublisher: fd = ", fd, " is no descriptor");
        require(interval_s > 0, "ProgressPublisher: interval_s = ", interval_s, " must be above 0");
        publisher_ = std::make_unique<epruntime::ProgressPublisher>(fd, static_cast<const int64_t*>(cells_.ptr),
                                                                    bytes / sizeof(int64_t), whole, interval_s);
    }
    void stop() {
        const py::gil_scoped_release unlocked;
        publisher_->stop();
    }
    bool running() const { return publisher_->running(); }
    int64_t num_sent() const { return publisher_->num_sent(); }

  private:
    py::buffer_info cells_;  // holds the memory; destroyed after the thread that reads it
    std::unique_ptr<epruntime::ProgressPublisher> publisher_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "C++ kernels of epruntime; called through epruntime.ops.";
    m.def("csrc_hash", [] { return std::string(EPRUNTIME_CSRC_HASH); });
    m.def("isa", [] { return std::string(selected()->name); });
    m.def("supported_isas", &supported_isas);
    m.def("select_isa", &select_isa);
    m.def("write_kv_cache", &write_kv_cache);
    m.def("paged_attention", &paged_attention);
    m.def("combine_rows", &combine_rows);
    m.def("pack_rows", &pack_rows);
    define_gemm(m);
    py::class_<Publisher>(m, "ProgressPublisher")
        .def(py::init<int, const py::buffer&, const py::bytes&, double>(), py::arg("fd"), py::arg("cells"),
             py::arg("frame"), py::arg("interval_s"))
        .def("stop", &Publisher::stop)
        .def_property_readonly("running", &Publisher::running)
        .def_property_readonly("num_sent", &Publisher::num_sent);
}
