// The Python module epruntime._kv: NativeKVCache, as epruntime/engine/kv_cache.py describes it.
//
// pybind11 comes with torch; torch itself is neither included nor linked, so that scheduling starts without it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kv/kv_cache.h"

namespace {

namespace py = pybind11;
using epruntime::kv::KvCache;
using epruntime::kv::Rid;
using epruntime::kv::Token;

template <typename T>
std::span<const T> view(const py::array_t<T, py::array::c_style | py::array::forcecast>& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}

template <typename T>
py::tuple as_tuple(const std::vector<T>& values) {
    py::tuple result(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        PyTuple_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(values[i]));
    }
    return result;
}

py::bytes as_bytes(const std::vector<Token>& tokens) {
    return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token)};
}

using Rids = py::array_t<Rid, py::array::c_style | py::array::forcecast>;
using Tokens = py::array_t<Token, py::array::c_style | py::array::forcecast>;

std::vector<std::size_t> append(KvCache& self, const Rids& rids, const Tokens& token_ids) {
    if (rids.size() != token_ids.size()) throw py::value_error("rids and token_ids differ in length");
    return self.append(view(rids), view(token_ids));
}

py::object admit(KvCache& self, Rid rid, std::int64_t num_skippable) {
    const auto num_cached = self.admit(rid, num_skippable);
    if (!num_cached) return py::none();
    return py::make_tuple(*num_cached, as_tuple(self.table(rid)));
}

}  // namespace

PYBIND11_MODULE(_kv, module) {
    module.doc() = "The KV cache's books in C++; see epruntime/engine/kv_cache.py.";
    module.def("csrc_hash", [] { return std::string(EPRUNTIME_CSRC_HASH); });
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const epruntime::kv::UnknownRequest& error) {
            PyErr_SetObject(PyExc_KeyError, py::int_(error.rid).ptr());
        }
    });
    py::class_<KvCache>(module, "NativeKVCache")
        .def(py::init<int, int, bool>(), py::kw_only(), py::arg("num_blocks"), py::arg("block_size"),
             py::arg("prefix_caching"))
        .def_property_readonly("num_blocks", &KvCache::num_blocks)
        .def_property_readonly("block_size", &KvCache::block_size)
        .def_property_readonly("prefix_caching", &KvCache::prefix_caching)
        .def_property_readonly("num_free_blocks", &KvCache::num_free_blocks)
        .def("add", &KvCache::add)
        .def("forget", &KvCache::forget)
        .def("token_ids", [](const KvCache& self, Rid rid) { return as_bytes(self.tokens(rid)); })
        .def("append", &append)
        .def("can_admit", &KvCache::can_admit)
        .def("admit", &admit)
        .def("grow", [](KvCache& self, const std::vector<Rid>& rids) { return self.grow(rids); })
        .def("confirm", &KvCache::confirm)
        .def("release", &KvCache::release)
        .def("num_returning",
             [](const KvCache& self, const std::vector<Rid>& rids) { return self.num_returning(rids); })
        .def("end_step", &KvCache::end_step);
}
