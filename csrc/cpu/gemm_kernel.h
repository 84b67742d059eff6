// Matrix products: rows of a and columns of b, each read along k -> lanes of partial sums -> one tree over the lanes.
//
// An element's bits depend on its row of a, its column of b and K alone:
//  - lane l of its sum adds k = l, l + kLanes, ... in ascending order (with bf16 products in pairs: 2 l, 2 l + 1, ...);
//  - the last step reads zeros beyond K;
//  - one tree adds the lanes, then comes the bias, then the one rounding.
// Elements are worked on in tiles of a few rows and columns only to read each of them less often; they never mix, so
// that edge tiles, threads and the place in the batch change nothing. A row-major b is transposed piece by piece, and
// then goes the same way.
#pragma once

#include "common/types.h"
#include "cpu/simd.h"

namespace {

using epruntime::GemmArgs;
using epruntime::GemmUnit;

// Accumulators of a tile, sized for the registers there are.
#if defined(EPRUNTIME_SIMD_AVX512)
constexpr int kGemmRows = 4, kGemmColumns = 6;
#elif defined(EPRUNTIME_SIMD_AVX2)
constexpr int kGemmRows = 3, kGemmColumns = 4;
#else
constexpr int kGemmRows = 2, kGemmColumns = 4;
#endif

// One step along k: `kStep` elements of a row of a and of a column of b. Panel: the elements of a transposed b.
// across() loads one 32-bit word of each of kLanes adjacent columns of a row-major b, across_first() of `count` columns
// from row k on, with zeros in the other lanes and from row `depth` on.
template <typename T>
struct Along {
    using Panel = float;
    using Word = Vec;
    static constexpr int64_t kStep = kLanes, kWord = 1;

    static Vec multiply_add(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
    static Vec across(const T* b, int64_t) { return load(b); }
    static Vec across_first(const T* b, int64_t stride, int64_t k, int64_t depth, int64_t count) {
        return k < depth ? load_first(b + k * stride, count) : splat(0.0f);
    }
    template <typename U>
    static Vec whole(const U* p) {
        return load(p);
    }
    template <typename U>
    static Vec first(const U* p, int64_t count) {
        return load_first(p, count);
    }
};

#if defined(EPRUNTIME_SIMD_BF16)
// vdpbf16ps adds two products to each lane. It takes subnormal numbers for zero, whatever the process has set.
template <>
struct Along<uint16_t> {
    using Panel = uint16_t;
    using Word = __m512bh;
    static constexpr int64_t kStep = 2 * kLanes, kWord = 2;

    static Vec multiply_add(Word a, Word b, Vec sum) { return _mm512_dpbf16_ps(sum, a, b); }
    static Vec across(const uint16_t* b, int64_t stride) {
        return _mm512_castsi512_ps(_mm512_or_si512(load_halves(b), _mm512_slli_epi32(load_halves(b + stride), 16)));
    }
    static Vec across_first(const uint16_t* b, int64_t stride, int64_t k, int64_t depth, int64_t count) {
        __m512i even = _mm512_setzero_si512(), odd = even;
        if (k < depth) even = load_first_halves(b + k * stride, count);
        if (k + 1 < depth) odd = load_first_halves(b + (k + 1) * stride, count);
        return _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
    static Word whole(const uint16_t* p) { return (Word)_mm512_loadu_si512(p); }
    static Word first(const uint16_t* p, int64_t count) {
        return (Word)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1), p);
    }
};
#endif

// Bytes of a row or column that are worked on at once, so that a tile's share of both stays in the first-level cache.
constexpr int64_t kChunkBytes = 2048;
// Of sums between two chunks, so that they stay in the second-level cache.
constexpr int64_t kCarriedBytes = 384 << 10;

template <typename T>
constexpr int64_t gemm_chunk_depth() {
    return kChunkBytes / sizeof(typename Along<T>::Panel);
}

// What a tile is made of: rows of a and columns of b, from one k on, and the lanes of its kGemmRows x kGemmColumns
// sums.
template <typename T, typename U>
struct GemmTile {
    const T* a;
    int64_t a_stride;
    const U* columns[kGemmColumns];
    int64_t ahead;  // elements of b from here to what is fetched meanwhile
    Vec* lanes;
};

// Whole steps up to `depth`, for kRows rows. Sums start from zero where `begins`. kAhead: fetches.
template <typename T, typename U, int kRows, bool kAhead>
void gemm_steps(const GemmTile<T, U>& tile, int64_t depth, bool begins) {
    using Step = Along<T>;
    Vec sum[kRows * kGemmColumns];
    if (begins)
        for (int i = 0; i < kRows * kGemmColumns; ++i) sum[i] = splat(0.0f);
    else
        for (int i = 0; i < kRows * kGemmColumns; ++i) sum[i] = tile.lanes[i];
    const T* a = tile.a;
    const U* b[kGemmColumns];
    for (int c = 0; c < kGemmColumns; ++c) b[c] = tile.columns[c];
    const int64_t a_stride = tile.a_stride, ahead = tile.ahead;
    for (int64_t k = 0; k + Step::kStep <= depth; k += Step::kStep) {
        typename Step::Word x[kRows];
        for (int r = 0; r < kRows; ++r) x[r] = Step::whole(a + r * a_stride + k);
        for (int c = 0; c < kGemmColumns; ++c) {
            const typename Step::Word y = Step::whole(b[c] + k);
            if (kAhead) __builtin_prefetch(b[c] + k + ahead, 0, 3);
            for (int r = 0; r < kRows; ++r)
                sum[r * kGemmColumns + c] = Step::multiply_add(x[r], y, sum[r * kGemmColumns + c]);
        }
    }
    for (int i = 0; i < kRows * kGemmColumns; ++i) tile.lanes[i] = sum[i];
}

// The last step, shorter than the others, if there is one.
template <typename T, typename U>
void gemm_last_step(const GemmTile<T, U>& tile, int64_t rows, int64_t depth) {
    using Step = Along<T>;
    const int64_t whole = depth / Step::kStep * Step::kStep;
    if (whole == depth) return;
    for (int64_t r = 0; r < rows; ++r) {
        const typename Step::Word x = Step::first(tile.a + r * tile.a_stride + whole, depth - whole);
        for (int c = 0; c < kGemmColumns; ++c) {
            Vec* sum = tile.lanes + r * kGemmColumns + c;
            *sum = Step::multiply_add(x, Step::first(tile.columns[c] + whole, depth - whole), *sum);
        }
    }
}

template <typename T, typename U, bool kAhead>
void gemm_steps_of(int64_t rows, const GemmTile<T, U>& tile, int64_t depth, bool begins) {
    static_assert(2 <= kGemmRows && kGemmRows <= 4);
    switch (rows) {
        case 1:
            return gemm_steps<T, U, 1, kAhead>(tile, depth, begins);
        case 2:
            return gemm_steps<T, U, 2, kAhead>(tile, depth, begins);
        case 3:
            return gemm_steps < T, U, kGemmRows<3 ? kGemmRows : 3, kAhead>(tile, depth, begins);
        default:
            return gemm_steps<T, U, kGemmRows, kAhead>(tile, depth, begins);
    }
}

// sums[i] = the lanes of sum i, added up.
inline void add_up(const Vec* lanes, int64_t count, float* sums) {
    for (int64_t i = 0; i < count; i += kLanes) {
        Vec each[kLanes];
        for (int64_t j = 0; j < kLanes; ++j) each[j] = lanes[least(i + j, count - 1)];
        store(sums + i, sum_each(each));
    }
}

// A chunk of k: `depth` elements from `first` on.
struct Chunk {
    int64_t first, depth;
    bool begins, ends;
};

// The chunk of `num_rows` rows from `row` on, times the unit's columns, which begin `stride` elements apart at b.
template <typename T, typename U>
void gemm_chunk(const GemmArgs& args, const GemmUnit& unit, int64_t row, int64_t num_rows, const Chunk& chunk,
                const U* b, int64_t stride, Vec* carried) {
    const T* a = static_cast<const T*>(unit.a) + row * args.a_row_stride + chunk.first;
    GemmTile<T, U> tile;
    tile.a_stride = args.a_row_stride;
    tile.ahead = kGemmColumns * stride;
    tile.lanes = carried;
    for (int64_t column = 0; column < unit.num_columns; column += kGemmColumns) {
        const int64_t width = least(kGemmColumns, unit.num_columns - column);
        for (int64_t c = 0; c < kGemmColumns; ++c)  // past the last column: that column again
            tile.columns[c] = b + (column + least(c, width - 1)) * stride;
        for (int64_t r = 0; r < num_rows; r += kGemmRows) {
            const int64_t rows = least(kGemmRows, num_rows - r);
            tile.a = a + r * args.a_row_stride;
            if (row + r == 0)  // these columns are new, and so are the next ones
                gemm_steps_of<T, U, true>(rows, tile, chunk.depth, chunk.begins);
            else
                gemm_steps_of<T, U, false>(rows, tile, chunk.depth, chunk.begins);
            float sums[(kGemmRows * kGemmColumns + kLanes - 1) / kLanes * kLanes];
            if (chunk.ends) {
                gemm_last_step(tile, rows, chunk.depth);
                add_up(tile.lanes, rows * kGemmColumns, sums);
            }
            tile.lanes += kGemmRows * kGemmColumns;
            if (!chunk.ends) continue;
            for (int64_t i = 0; i < rows; ++i) {
                T* out = static_cast<T*>(unit.out) + (row + r + i) * args.out_row_stride + unit.first_column + column;
                const float* sum = sums + i * kGemmColumns;
                const float* bias = unit.bias ? unit.bias + unit.first_column + column : nullptr;
                for (int64_t c = 0; c < width; ++c) narrow(bias ? sum[c] + bias[c] : sum[c], &out[c]);
            }
        }
    }
}

// Elements between columns of a transposed chunk: an odd number of cache lines, so that they share out the cache.
template <typename T>
constexpr int64_t panel_stride() {
    constexpr int64_t kLine = 64 / sizeof(typename Along<T>::Panel);
    return gemm_chunk_depth<T>() + kLine;
}

// A chunk of the unit's columns of a row-major b, each made contiguous.
template <typename T>
void transpose_chunk(const GemmArgs& args, const GemmUnit& unit, const Chunk& chunk, typename Along<T>::Panel* panel) {
    using Step = Along<T>;
    const T* b = static_cast<const T*>(unit.b) + unit.first_column + chunk.first * args.b_stride;
    for (int64_t k = 0; k < chunk.depth; k += Step::kStep)
        for (int64_t column = 0; column < unit.num_columns; column += kLanes) {
            const int64_t count = least(kLanes, unit.num_columns - column);
            Vec words[kLanes];
            if (count == kLanes && k + Step::kStep <= chunk.depth) {
                for (int i = 0; i < kLanes; ++i)
                    words[i] = Step::across(b + column + (k + i * Step::kWord) * args.b_stride, args.b_stride);
                for (int i = 0; i < Step::kStep; ++i)
                    __builtin_prefetch(b + column + (k + Step::kStep + i) * args.b_stride, 0, 3);
                transpose(words);
                for (int c = 0; c < kLanes; ++c)
                    std::memcpy(panel + (column + c) * panel_stride<T>() + k, &words[c], sizeof(Vec));
                continue;
            }
            for (int i = 0; i < kLanes; ++i)
                words[i] = Step::across_first(b + column, args.b_stride, k + i * Step::kWord, chunk.depth, count);
            transpose(words);
            for (int64_t c = 0; c < count; ++c)
                std::memcpy(panel + (column + c) * panel_stride<T>() + k, &words[c], sizeof(Vec));
        }
}

// Rows that go through all chunks of k before the next ones do: as many as there is room for their sums.
inline int64_t gemm_block_rows(int64_t columns) {
    return most(kGemmRows, kCarriedBytes / (round_up(columns, kGemmColumns) * sizeof(Vec)) / kGemmRows * kGemmRows);
}

inline int64_t carried_floats(const GemmUnit& unit) {
    const int64_t rows = round_up(least(unit.num_rows, gemm_block_rows(unit.num_columns)), kGemmRows);
    return rows * round_up(unit.num_columns, kGemmColumns) * kLanes;
}

template <typename T>
void gemm_unit_of(const GemmArgs& args, const GemmUnit& unit, float* scratch) {
    // Few rows need no chunks: a column is read once or twice.
    const bool in_chunks = args.b_row_major || unit.num_rows > kGemmRows;
    const int64_t chunk_depth = in_chunks ? gemm_chunk_depth<T>() : most(1, args.depth);
    const int64_t block_rows = gemm_block_rows(unit.num_columns);
    Vec* carried = reinterpret_cast<Vec*>(scratch);
    for (int64_t row = 0; row < unit.num_rows; row += block_rows) {
        const int64_t rows = least(block_rows, unit.num_rows - row);
        Chunk chunk = {0, 0, true, false};
        do {
            chunk.depth = least(chunk_depth, args.depth - chunk.first);
            chunk.ends = chunk.first + chunk.depth == args.depth;
            if (args.b_row_major) {
                using Panel = typename Along<T>::Panel;
                Panel* panel = reinterpret_cast<Panel*>(scratch + carried_floats(unit));
                transpose_chunk<T>(args, unit, chunk, panel);
                gemm_chunk<T, Panel>(args, unit, row, rows, chunk, panel, panel_stride<T>(), carried);
            } else {
                const T* b = static_cast<const T*>(unit.b) + unit.first_column * args.b_stride + chunk.first;
                gemm_chunk<T, T>(args, unit, row, rows, chunk, b, args.b_stride, carried);
            }
            chunk.begins = false;
            chunk.first += chunk.depth;
        } while (!chunk.ends);
    }
}

void gemm_unit(const GemmArgs& args, const GemmUnit& unit, float* scratch) {
    if (args.dtype == epruntime::DType::kFloat32)
        gemm_unit_of<float>(args, unit, scratch);
    else
        gemm_unit_of<uint16_t>(args, unit, scratch);
}

size_t gemm_scratch_floats(const GemmArgs& args, const GemmUnit& unit) {
    int64_t floats = carried_floats(unit);
    if (args.b_row_major)
        floats += unit.num_columns * (args.dtype == epruntime::DType::kFloat32
                                          ? panel_stride<float>()
                                          : panel_stride<uint16_t>() * int64_t{sizeof(Along<uint16_t>::Panel)} / 4);
    return static_cast<size_t>(floats);
}

}  // namespace
