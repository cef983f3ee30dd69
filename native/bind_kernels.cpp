// `_native.kernels`: packing, and each instruction set's matrix kernels one by one, for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "matrix.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nano {
namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Lanes = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string &why) { throw nb::value_error(why.c_str()); }

struct Free {
    void operator()(void *p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(size_t bytes) {
    Memory memory(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    if (!memory) throw std::bad_alloc();
    return memory;
}

struct PackedMatrix {
    Matrix matrix;
    Memory memory;
};

struct QuantizedRows {
    Activations activations;
    int rows;
    Memory memory;
};

Format format_of(const std::string &name) {
    if (name == "f32") return Format::f32;
    if (name == "f16") return Format::f16;
    if (name == "bf16") return Format::bf16;
    if (name == "q8") return Format::q8;
    if (name == "q4") return Format::q4;
    if (name == "q4_k") return Format::q4_k;
    if (name == "q5_k") return Format::q5_k;
    if (name == "q6_k") return Format::q6_k;
    refuse("no kernel reads weights as " + name);
}

Matrix shape_of(const std::string &format, int n, int k, int group, bool minimum) {
    Matrix m{format_of(format), n, k, group, minimum, nullptr, 0};
    if (n <= 0 || k <= 0) refuse("a matrix needs outputs and inputs");
    if (m.quantized() && (group <= 0 || group % BLOCK || k % group))
        refuse("columns must be whole groups, groups multiples of 32");
    if (m.format == Format::q8 && group != BLOCK) refuse("q8 has groups of 32");
    if (has_super_blocks(m.format) && group != SUPER) refuse(format + " has super-blocks of 256");
    m.bytes = packed_bytes(m.format, n, k, group, minimum);
    return m;
}

// (n, …) with the groups either a dimension of their own or contiguous inside a row; `bytes` in each of `groups`.
Plane plane_of(const std::optional<Array> &given, int n, size_t groups, size_t bytes, const char *name) {
    if (bytes == 0) return {};
    if (!given) refuse(std::string("the plane ") + name + " is missing");
    const Array &array = *given;
    const size_t item = array.dtype().bits / 8;
    size_t total = item;
    for (size_t d = 1; d < array.ndim(); d++) total *= array.shape(d);
    if (array.ndim() < 2 || array.ndim() > 3 || array.shape(0) != (size_t)n || total != groups * bytes)
        refuse(std::string(name) + " do not have the matrix's shape");
    const size_t last = array.ndim() - 1;
    Plane plane{(const uint8_t *)array.data(), (ptrdiff_t)(array.stride(0) * item), (ptrdiff_t)bytes};
    if (array.ndim() == 3) {
        if (array.shape(1) != groups) refuse(std::string(name) + " have another number of groups");
        plane.group = array.stride(1) * item;
    } else if (bytes == item) {
        plane.group = array.stride(1) * item;
        return plane;
    }
    if (array.shape(last) > 1 && array.stride(last) != 1) refuse(std::string(name) + " must be contiguous inside a group");
    return plane;
}

PackedMatrix pack_planes(const std::string &format, int n, int k, int group, bool minimum, const Array &values,
                         const std::optional<Array> &scales, const std::optional<Array> &mins, const std::optional<Array> &high,
                         const std::optional<Array> &sub_scales, const std::optional<Array> &sub_mins) {
    Matrix m = shape_of(format, n, k, group, minimum);
    const size_t groups = m.quantized() ? k / group : 1;
    const PlaneBytes bytes = plane_bytes(m);
    const Planes planes{plane_of(values, n, groups, bytes.values, "values"),
                        plane_of(scales, n, groups, bytes.scales, "scales"),
                        plane_of(mins, n, groups, bytes.mins, "mins"),
                        plane_of(high, n, groups, bytes.high, "high"),
                        plane_of(sub_scales, n, groups, bytes.sub_scales, "sub_scales"),
                        plane_of(sub_mins, n, groups, bytes.sub_mins, "sub_mins")};
    Memory memory = allocate(m.bytes);
    pack(m, planes, (uint8_t *)memory.get(), 0, m.blocks());
    m.data = (const uint8_t *)memory.get();
    return {m, std::move(memory)};
}

const MatrixKernels &kernels_of(const std::string &isa) {
    const Kernels *found = find_kernels(isa.c_str());
    if (!found) refuse("this build or processor has no kernels for " + isa);
    return *found->matrix;
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels *k : available_kernels()) names.push_back(k->name);
    return names;
}

template <class Input> size_t leading(const Input &x) {
    if (x.shape(1) > 1 && x.stride(1) != 1) refuse("rows must be contiguous");
    return (size_t)x.stride(0);
}

QuantizedRows quantize_rows(const std::string &isa, const Floats &x) {
    if (x.shape(1) % BLOCK) refuse("activations are quantised in groups of 32 columns");
    const int rows = (int)x.shape(0), k = (int)x.shape(1);
    Memory memory = allocate(activations_bytes(rows, k));
    const auto &kernels = kernels_of(isa);
    QuantizedRows q{activations_in(memory.get(), k, kernels.panel(rows)), rows, std::move(memory)};
    kernels.quantize(x.data(), leading(x), 0, rows, q.activations);
    return q;
}

struct Range {
    int begin, end;
};

Range range_of(const Matrix &m, int begin, int end) {
    if (end < 0) end = m.blocks();
    if (begin < 0 || begin > end || end > m.blocks()) refuse("blocks outside the matrix");
    return {begin, end};
}

void check_output(const Matrix &m, const Output &out, size_t rows, const std::optional<Vector> &bias) {
    if (out.shape(0) != rows || out.shape(1) != (size_t)m.n) refuse("out must be (rows, outputs)");
    if (bias && bias->shape(0) != (size_t)m.n) refuse("bias must be (outputs,)");
}

void linear_quantized(const std::string &isa, const PackedMatrix &w, const QuantizedRows &x, Output out,
                      std::optional<Vector> bias, bool accumulate, int begin, int end) {
    const Matrix &m = w.matrix;
    if (!m.quantized() || m.k != x.activations.k) refuse("matrix and activations do not fit");
    check_output(m, out, x.rows, bias);
    const Range blocks = range_of(m, begin, end);
    kernels_of(isa).linear(m, x.activations, nullptr, 0, x.rows, out.data(), leading(out), blocks.begin, blocks.end,
                           bias ? bias->data() : nullptr, accumulate);
}

void linear_float(const std::string &isa, const PackedMatrix &w, const Floats &x, Output out, std::optional<Vector> bias,
                  bool accumulate, int begin, int end) {
    const Matrix &m = w.matrix;
    if (m.quantized() || (size_t)m.k != x.shape(1)) refuse("matrix and inputs do not fit");
    check_output(m, out, x.shape(0), bias);
    const Range blocks = range_of(m, begin, end);
    kernels_of(isa).linear(m, {}, x.data(), leading(x), (int)x.shape(0), out.data(), leading(out), blocks.begin,
                           blocks.end, bias ? bias->data() : nullptr, accumulate);
}

void embed_rows(const std::string &isa, const PackedMatrix &w, const Ids &ids, Output out) {
    const Matrix &m = w.matrix;
    if (out.shape(0) != ids.shape(0) || out.shape(1) != (size_t)m.k) refuse("out must be (ids, inputs)");
    for (size_t i = 0; i < ids.shape(0); i++)
        if (ids.data()[i] < 0 || ids.data()[i] >= m.n) refuse("an id outside the matrix");
    kernels_of(isa).embed(m, ids.data(), 0, (int)ids.shape(0), out.data(), leading(out));
}

void probe_lanes(const std::string &isa, Probe op, const Vector &a, const Vector &b, const Vector &c, Lanes out) {
    if (b.size() != a.size() || c.size() != a.size() || out.size() != a.size()) refuse("a, b, c and out must have one length");
    kernels_of(isa).probe(op, a.data(), b.data(), c.data(), out.data(), a.size());
}

template <class T> nb::object copy_of(const T *data, size_t rows, size_t columns) {
    T *copy = new T[rows * columns];
    memcpy(copy, data, rows * columns * sizeof(T));
    nb::capsule owner(copy, [](void *p) noexcept { delete[] (T *)p; });
    return nb::ndarray<nb::numpy, T>(copy, {rows, columns}, owner).cast();
}

// One member of all rows of groups, row by row: (rows, k) int8 or (rows, k / 32) numbers.
template <class Member> nb::object rows_of(const QuantizedRows &x, Member ActivationRow::*member) {
    using Item = std::remove_all_extents_t<Member>;
    const size_t groups = x.activations.k / BLOCK, each = sizeof(Member) / sizeof(Item);
    std::vector<Item> all(x.rows * groups * each);
    for (int r = 0; r < x.rows; r++)
        for (size_t g = 0; g < groups; g++) {
            const Item *items = (const Item *)&(x.activations.at(r)[g * x.activations.panel].*member);
            std::copy_n(items, each, all.begin() + (r * groups + g) * each);
        }
    return copy_of(all.data(), x.rows, groups * each);
}

}  // namespace

void bind_kernels(nb::module_ &module) {
    nb::class_<PackedMatrix>(module, "Matrix")
        .def_prop_ro("nbytes", [](const PackedMatrix &m) { return m.matrix.bytes; })
        .def_prop_ro("blocks", [](const PackedMatrix &m) { return m.matrix.blocks(); })
        .def_prop_ro("packed", [](const PackedMatrix &m) { return copy_of(m.matrix.data, 1, m.matrix.bytes); });
    nb::class_<QuantizedRows>(module, "Activations")
        .def_prop_ro("quants", [](const QuantizedRows &x) { return rows_of(x, &ActivationRow::q); })
        .def_prop_ro("scales", [](const QuantizedRows &x) { return rows_of(x, &ActivationRow::scale); })
        .def_prop_ro("sums", [](const QuantizedRows &x) { return rows_of(x, &ActivationRow::sum); })
        .def_prop_ro("shifts", [](const QuantizedRows &x) { return rows_of(x, &ActivationRow::shift); });

    module.def("isas", &isas, "Instruction sets that this build and this processor have, widest first.");
    module.def("packed_bytes", [](const std::string &format, int n, int k, int group, bool minimum) {
        return shape_of(format, n, k, group, minimum).bytes;
    }, "format"_a, "n"_a, "k"_a, "group"_a = 0, "minimum"_a = false);
    module.def("pack", &pack_planes, "format"_a, "n"_a, "k"_a, "group"_a, "minimum"_a, "values"_a, "scales"_a.none() = nb::none(),
               "mins"_a.none() = nb::none(), "high"_a.none() = nb::none(), "sub_scales"_a.none() = nb::none(),
               "sub_mins"_a.none() = nb::none(),
               "A Matrix in the kernels' layout; planes (n, …) or (n, groups, …) as formats/ has them.");
    module.def("quantize", &quantize_rows, "isa"_a, "x"_a);
    module.def("linear", &linear_quantized, "isa"_a, "w"_a, "x"_a, "out"_a, "bias"_a.none() = nb::none(), "accumulate"_a = false,
               "begin"_a = 0, "end"_a = -1);
    module.def("linear", &linear_float, "isa"_a, "w"_a, "x"_a, "out"_a, "bias"_a.none() = nb::none(), "accumulate"_a = false,
               "begin"_a = 0, "end"_a = -1, "out (+)= x · wᵀ + bias for blocks begin..end−1 of 32 outputs.");
    module.def("embed", &embed_rows, "isa"_a, "w"_a, "ids"_a, "out"_a);
    nb::enum_<Probe>(module, "Probe")
        .value("add", Probe::add).value("subtract", Probe::subtract).value("multiply", Probe::multiply)
        .value("divide", Probe::divide).value("fma", Probe::fma).value("max", Probe::max).value("min", Probe::min)
        .value("sqrt", Probe::sqrt).value("exp", Probe::exp)
        .value("exp2_down", Probe::exp2_down).value("f16", Probe::f16).value("bf16", Probe::bf16)
        .value("to_i32", Probe::to_i32).value("select_less", Probe::select_less).value("first", Probe::first)
        .value("reduce_add", Probe::reduce_add).value("reduce_max", Probe::reduce_max);
    module.def("spin", [](const std::string &isa, const std::string &format, size_t steps) {
        return kernels_of(isa).spin(format_of(format), steps);
    }, "isa"_a, "format"_a, "steps"_a, nb::call_guard<nb::gil_scoped_release>(),
               "-> multiply-adds done without memory, the ceiling of `linear`. Frees the GIL.");
    module.def("probe", &probe_lanes, "isa"_a, "op"_a, "a"_a, "b"_a, "c"_a, "out"_a);
}

}  // namespace nano
