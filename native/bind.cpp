// `_native`: the session, as nano_vllm/backends/cpu builds and calls it. Wrong arguments raise ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "session.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace nano {

void bind_kernels(nb::module_ &module);

namespace {

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Plane2 = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string &what) {
    if (!holds) throw std::invalid_argument(what);
}

template <class T>
T by_name(const std::string &name, const std::vector<std::pair<const char *, T>> &known, const char *kind) {
    for (const auto &[text, value] : known)
        if (name == text) return value;
    throw std::invalid_argument(std::string("no ") + kind + " is called " + name);
}

CacheType cache_type(const std::string &name) {
    return by_name<CacheType>(name, {{"f32", CacheType::f32}, {"f16", CacheType::f16}, {"bf16", CacheType::bf16}, {"int16", CacheType::int16}, {"int8", CacheType::int8}}, "cache type");
}

Format format(const std::string &name) {
    return by_name<Format>(name,
                           {{"f32", Format::f32},
                            {"f16", Format::f16},
                            {"bf16", Format::bf16},
                            {"q8", Format::q8},
                            {"q4", Format::q4},
                            {"q4_k", Format::q4_k},
                            {"q5_k", Format::q5_k},
                            {"q6_k", Format::q6_k}},
                           "weight format");
}

Activation activation(const std::string &name) {
    return by_name<Activation>(name, {{"silu", Activation::silu}, {"gelu_tanh", Activation::gelu_tanh}}, "activation");
}

using MaybePlane = std::optional<Plane2>;

// A canonical plane of n rows, `bytes` in each group; none where the format has none.
Plane plane(const MaybePlane &array, int n, int64_t groups, int64_t bytes, const char *name) {
    if (bytes == 0) return {};
    require(array.has_value(), std::string("the plane ") + name + " is missing");
    const int64_t item = array->dtype().bits / 8, row = int64_t(array->shape(1)) * item;
    require(int64_t(array->shape(0)) == n && row == groups * bytes,
            std::string("the plane ") + name + " does not fit the matrix's shape");
    return {static_cast<const uint8_t *>(array->data()), ptrdiff_t(row), ptrdiff_t(bytes)};
}

int add_matrix(Session &session, const std::string &name, int n, int k, int group, bool minimum, const Plane2 &values,
               const MaybePlane &scales, const MaybePlane &mins, const MaybePlane &high, const MaybePlane &sub_scales,
               const MaybePlane &sub_mins) {
    const Matrix shape{format(name), n, k, group, minimum, nullptr, 0};
    if (shape.quantized()) require(group >= 32 && k % group == 0, "columns must come in whole groups of 32 or more");
    const int64_t groups = shape.quantized() ? k / group : 1;
    const PlaneBytes bytes = plane_bytes(shape);
    const Planes planes{plane(values, n, groups, int64_t(bytes.values), "values"),
                        plane(scales, n, groups, int64_t(bytes.scales), "scales"),
                        plane(mins, n, groups, int64_t(bytes.mins), "mins"),
                        plane(high, n, groups, int64_t(bytes.high), "high"),
                        plane(sub_scales, n, groups, int64_t(bytes.sub_scales), "sub_scales"),
                        plane(sub_mins, n, groups, int64_t(bytes.sub_mins), "sub_mins")};
    nb::gil_scoped_release release;
    return session.add_matrix(shape, planes);
}

int add_packed(Session &session, const std::string &name, int n, int k, int group, bool minimum, const Array1<uint8_t> &data) {
    return session.add_packed({format(name), n, k, group, minimum, data.data(), data.size()});
}

// Mapped bytes become resident, read from the disk where they must be; where the system cannot do that they are asked for.
void populate(const Array1<uint8_t> &data) {
#if defined(__unix__) || defined(__APPLE__)
    nb::gil_scoped_release release;
    const auto mask = uintptr_t(sysconf(_SC_PAGESIZE)) - 1;
    const auto begin = reinterpret_cast<uintptr_t>(data.data()) & ~mask;
    const size_t bytes = reinterpret_cast<uintptr_t>(data.data()) + data.size() - begin;
#ifdef MADV_POPULATE_READ
    if (madvise(reinterpret_cast<void *>(begin), bytes, MADV_POPULATE_READ) == 0) return;
#endif
    madvise(reinterpret_cast<void *>(begin), bytes, MADV_WILLNEED);  // a wish
#endif
}

template <class T>
nb::object array_of(std::vector<T> &&values, size_t rows, size_t columns) {
    auto *kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<std::vector<T> *>(p); });
    return nb::ndarray<nb::numpy, T>(kept->data(), {rows, columns}, owner).cast();
}

nb::object run(Session &session, const Array1<int32_t> &tokens, const Array1<int32_t> &positions, const Array1<int32_t> &starts,
               const Table &blocks, const Array1<int32_t> &wanted, bool trace) {
    require(positions.size() == tokens.size(), "tokens and positions differ in length");
    require(starts.size() == blocks.shape(0) + 1, "starts must have one entry more than there are sequences");
    const StepInput input{int(tokens.size()), int(blocks.shape(0)), int(blocks.shape(1)), int(wanted.size()), tokens.data(),
                          positions.data(),   starts.data(),        blocks.data(),        wanted.data()};
    std::vector<Copy> copies;
    {
        nb::gil_scoped_release release;
        session.run(input, trace ? &copies : nullptr);
    }
    if (!trace) return nb::none();
    nb::list out;
    for (Copy &copy : copies) out.append(array_of(std::move(copy.values), copy.rows, copy.width));
    return out;
}

nb::object logits(const Session &session, const Array1<int32_t> &rows) {
    const size_t vocab = session.shape().vocab;
    std::vector<float> values(rows.size() * vocab);
    for (size_t i = 0; i < rows.size(); ++i) {
        const int32_t row = rows.data()[i];
        require(row >= 0 && row < session.logits_rows(), "logits of a row that the last step did not want");
        std::copy_n(session.logits(row), vocab, values.begin() + i * vocab);
    }
    return array_of(std::move(values), rows.size(), vocab);
}

// Arguments as in SamplingBatch; `skip` marks rows that get no id.
nb::object draw(Session &session, const Array1<bool> &skip, const Array1<float> &temperature, const Array1<float> &repetition,
                const Array1<float> &frequency, const Array1<float> &presence, const Array1<double> &min_p,
                const Array1<double> &top_p, const Array1<int32_t> &top_k, const Array1<uint64_t> &seed,
                const Array1<int32_t> &index, const Array1<int32_t> &position, const Array1<int32_t> &history,
                const Array1<int32_t> &history_starts, const Array1<int32_t> &prompt_lengths, const Array1<int32_t> &banned,
                const Array1<int32_t> &banned_starts) {
    const size_t rows = skip.size();
    for (const size_t size :
         {temperature.size(), repetition.size(), frequency.size(), presence.size(), min_p.size(), top_p.size(), top_k.size(),
          seed.size(), index.size(), position.size(), prompt_lengths.size(), history_starts.size() - 1, banned_starts.size() - 1})
        require(size == rows, "sampling parameters differ in length");
    const Sampling parameters{
        int(rows),      session.shape().vocab, temperature.data(),    repetition.data(), frequency.data(),     presence.data(),
        min_p.data(),   top_p.data(),          top_k.data(),          seed.data(),       index.data(),         position.data(),
        history.data(), history_starts.data(), prompt_lengths.data(), banned.data(),     banned_starts.data(), skip.data()};
    check(parameters, int64_t(history.size()), int64_t(banned.size()));
    std::vector<int32_t> ids(rows);
    {
        nb::gil_scoped_release release;
        session.draw(parameters, ids.data());
    }
    auto *kept = new std::vector<int32_t>(std::move(ids));
    nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<std::vector<int32_t> *>(p); });
    return nb::ndarray<nb::numpy, int32_t>(kept->data(), {rows}, owner).cast();
}

Session *make_session(Session *self, int threads, const std::string &isa, int max_rows, int vocab, const std::string &kv_type,
                      int block_size, int num_blocks) {
    const Kernels *kernels = find_kernels(isa.c_str());
    require(kernels != nullptr, "this processor, or this build, has no instruction set called " + isa);
    return new (self) Session({threads, max_rows, vocab, cache_type(kv_type), block_size, num_blocks}, *kernels);
}

void bind_ops(nb::class_<Session> &session) {
    session.def(
               "embed", [](Session &s, int weight, int dst) { s.add_op(Embed{weight, dst}); }, "weight"_a, "dst"_a)
        .def(
            "normalize", [](Session &s, int weight, float eps, int src, int dst) { s.add_op(Normalize{weight, eps, src, dst}); },
            "weight"_a, "eps"_a, "src"_a, "dst"_a)
        .def(
            "linear",
            [](Session &s, std::vector<int> weights, std::vector<int> biases, int src, int dst, bool accumulate) {
                s.add_op(Linear{std::move(weights), std::move(biases), src, dst, accumulate});
            },
            "weights"_a, "biases"_a, "src"_a, "dst"_a, "accumulate"_a)
        .def(
            "rotate",
            [](Session &s, int buffer, int heads, int kv_heads, int head_size, int rope, int q_norm, int k_norm, float eps,
               int cache) { s.add_op(Rotate{buffer, heads, kv_heads, head_size, rope, q_norm, k_norm, eps, cache}); },
            "buffer"_a, "heads"_a, "kv_heads"_a, "head_size"_a, "rope"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "cache"_a)
        .def(
            "attend",
            [](Session &s, int src, int dst, int heads, int kv_heads, int head_size, float scale, int window, int cache) {
                s.add_op(Attend{src, dst, heads, kv_heads, head_size, scale, window, cache});
            },
            "src"_a, "dst"_a, "heads"_a, "kv_heads"_a, "head_size"_a, "scale"_a, "window"_a, "cache"_a)
        .def(
            "gate",
            [](Session &s, const std::string &name, int size, int src, int dst) {
                s.add_op(Gate{activation(name), size, src, dst});
            },
            "activation"_a, "size"_a, "src"_a, "dst"_a)
        .def("select", [](Session &s, int src, int dst) { s.add_op(Select{src, dst}); }, "src"_a, "dst"_a);
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a process may end, or be forked, without closing its models
    module.def(
        "instruction_sets",
        [] {
            std::vector<std::string> names;
            for (const Kernels *kernels : available_kernels()) names.push_back(kernels->name);
            return names;
        },
        "Those that were compiled in and that this processor has, widest first.");
    module.def("populate", &populate, "data"_a, "Reads mapped bytes from the disk where they are not in memory.");
    nb::module_ kernels = module.def_submodule("kernels");
    bind_kernels(kernels);
    nb::class_<Session> session(module, "Session");
    session
        .def(
            "__init__",
            [](Session *self, int threads, const std::string &isa, int max_rows, int vocab, const std::string &kv_type,
               int block_size,
               int num_blocks) { make_session(self, threads, isa, max_rows, vocab, kv_type, block_size, num_blocks); },
            "threads"_a, "isa"_a, "max_rows"_a, "vocab"_a, "kv_type"_a, "block_size"_a, "num_blocks"_a)
        .def_prop_ro("isa", [](const Session &s) { return s.kernels().name; })
        .def("add_buffer", &Session::add_buffer, "width"_a)
        .def("add_rope", &Session::add_rope, "frequencies"_a, "scale"_a)
        .def("add_cache", &Session::add_cache, "kv_heads"_a, "head_size"_a)
        .def(
            "add_vector", [](Session &s, const Array1<float> &values) { return s.add_vector(values.data(), int(values.size())); },
            "values"_a)
        .def("add_matrix", &add_matrix, "format"_a, "n"_a, "k"_a, "group"_a, "minimum"_a, "values"_a,
             "scales"_a.none() = nb::none(), "mins"_a.none() = nb::none(), "high"_a.none() = nb::none(),
             "sub_scales"_a.none() = nb::none(), "sub_mins"_a.none() = nb::none())
        .def("add_packed", &add_packed, "format"_a, "n"_a, "k"_a, "group"_a, "minimum"_a, "data"_a, nb::keep_alive<1, 7>())
        .def("seal", &Session::seal)
        .def("run", &run, "tokens"_a, "positions"_a, "starts"_a, "blocks"_a, "wanted"_a, "trace"_a = false)
        .def("logits", &logits, "rows"_a)
        .def("draw", &draw, "skip"_a, "temperature"_a, "repetition"_a, "frequency"_a, "presence"_a, "min_p"_a, "top_p"_a,
             "top_k"_a, "seed"_a, "index"_a, "position"_a, "history"_a, "history_starts"_a, "prompt_lengths"_a, "banned"_a,
             "banned_starts"_a)
        .def("memory",
             [](const Session &s) {
                 const MemoryUse use = s.memory();
                 nb::dict out;
                 out["weights"] = use.weights;
                 out["kv"] = use.kv;
                 out["scratch"] = use.scratch;
                 out["mapped"] = use.mapped;
                 return out;
             })
        .def("fill_cache", &Session::fill_cache, "byte"_a);
    bind_ops(session);
}

}  // namespace nano
