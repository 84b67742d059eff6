// Paged attention: query rows -> scores of a partition -> its own softmax parts -> merged in ascending order.
//
// A row's bits depend on its own query, its keys and values, and their positions alone:
//  - keys come in partitions that start at multiples of kPartition, whatever the number of query rows;
//  - a score is a dot product over the head's lanes in ascending order, then one tree over the lanes;
//  - a partition's sum runs per lane of (position mod kLanes), then the same tree; its values are added key by key;
//  - partitions are merged in ascending order.
// Rows are worked on together only to read keys and values once; they never mix. Keys that a row does not see are
// skipped, not multiplied by zero, so that unwritten pages may hold NaN. Partitions know nothing of one another before
// the merge: splitting them among threads would not change a bit.
#pragma once

#include "common/types.h"
#include "cpu/simd.h"

namespace {

using epruntime::AttentionArgs;
using epruntime::AttentionUnit;
using epruntime::kPartition;
using epruntime::kUnitRows;
using epruntime::PagedView;

// Scores come in tiles of kTileRows rows x 4 keys, whose kLanes accumulators sum_each turns into one vector.
constexpr int kTileKeys = 4;
constexpr int kTileRows = kLanes / kTileKeys;
// Values are added in tiles of kValueRows rows x kValueVecs vectors, sized for the registers there are.
constexpr int kValueRows = 4;
constexpr int kValueVecs = kLanes == 16 ? 4 : 2;
constexpr float kMinusInfinity = -__builtin_inff();

struct RowState {
    int64_t begin;  // first key seen
    int64_t end;    // one past the last
    float peak;
    float sum;
};

// Parts of the scratch memory; sizes in floats.
struct Scratch {
    int64_t key_width, value_width;  // head sizes rounded up to whole vectors
    float *q, *out, *part, *scores, *keys, *values, *zeros;

    static int64_t floats(const AttentionArgs& args) {
        const int64_t key = round_up(args.keys.size, kLanes), value = round_up(args.values.size, kLanes);
        return kUnitRows * (key + 2 * value + kPartition) + kPartition * (key + value) + key;
    }

    Scratch(const AttentionArgs& args, float* base)
        : key_width(round_up(args.keys.size, kLanes)), value_width(round_up(args.values.size, kLanes)) {
        q = base;
        out = q + kUnitRows * key_width;
        part = out + kUnitRows * value_width;
        scores = part + kUnitRows * value_width;
        keys = scores + kUnitRows * kPartition;
        values = keys + kPartition * key_width;
        zeros = values + kPartition * value_width;
        for (int64_t i = 0; i < key_width; ++i) zeros[i] = 0.0f;
    }
};

// Where the partition's keys (or values) lie as fp32 rows of whole vectors: in the cache itself, or copied there.
template <typename T>
void locate(const AttentionArgs& args, const AttentionUnit& unit, const PagedView& view, int64_t base, int64_t begin,
            int64_t end, float* copy, int64_t width, const float** pointers) {
    const int32_t* table = args.block_tables + unit.seq * args.table_stride;
    const bool in_place = sizeof(T) == sizeof(float) && view.size == width;
    for (int64_t key = begin; key < end; ++key) {
        const T* row = static_cast<const T*>(view.data) + table[key / args.block_size] * view.block_stride +
                       key % args.block_size * view.slot_stride + unit.kv_head * view.head_stride;
        if (in_place) {
            pointers[key - base] = reinterpret_cast<const float*>(row);
        } else {
            float* target = copy + (key - base) * width;
            widen_row(row, view.size, target, width);
            pointers[key - base] = target;
        }
    }
}

// scores[r][j] = scale * q[r] . keys[j] for kTileRows rows and kTileKeys keys.
inline void score_tile(const float* q, int64_t width, const float* const* keys, float scale, float* scores) {
    Vec sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = splat(0.0f);
    const float *key0 = keys[0], *key1 = keys[1], *key2 = keys[2], *key3 = keys[3];
    for (int64_t d = 0; d < width; d += kLanes) {
        const Vec k0 = load(key0 + d), k1 = load(key1 + d), k2 = load(key2 + d), k3 = load(key3 + d);
        for (int r = 0; r < kTileRows; ++r) {
            const Vec x = load(q + r * width + d);
            sums[r * kTileKeys + 0] = fma(x, k0, sums[r * kTileKeys + 0]);
            sums[r * kTileKeys + 1] = fma(x, k1, sums[r * kTileKeys + 1]);
            sums[r * kTileKeys + 2] = fma(x, k2, sums[r * kTileKeys + 2]);
            sums[r * kTileKeys + 3] = fma(x, k3, sums[r * kTileKeys + 3]);
        }
    }
    float tile[kLanes];
    store(tile, mul(sum_each(sums), splat(scale)));
    for (int r = 0; r < kTileRows; ++r)
        std::memcpy(scores + r * kPartition, tile + r * kTileKeys, kTileKeys * sizeof(float));
}

// The row's scores begin .. end (within the partition) become exp(score - peak).
inline void softmax_part(float* scores, int64_t begin, int64_t end, float softcap, float* peak, float* sum) {
    const int64_t first = begin / kLanes * kLanes, last = round_up(end, kLanes);
    if (softcap != 0.0f)
        for (int64_t j = first; j < last; j += kLanes) store(scores + j, soft_cap(load(scores + j), softcap));
    for (int64_t j = first; j < begin; ++j) scores[j] = kMinusInfinity;
    for (int64_t j = end; j < last; ++j) scores[j] = kMinusInfinity;
    Vec peaks = splat(kMinusInfinity);
    for (int64_t j = first; j < last; j += kLanes) peaks = max(load(scores + j), peaks);
    *peak = max_lanes(peaks);
    const Vec shift = splat(*peak);
    Vec sums = splat(0.0f);
    for (int64_t j = first; j < last; j += kLanes) {
        const Vec p = exp_nonpositive(sub(load(scores + j), shift));
        store(scores + j, p);
        sums = add(sums, p);
    }
    *sum = sum_lanes(sums);
}

// part[r] += p[r][j] * values[j] for keys begin .. end in ascending order.
template <int kRows, int kVecs>
inline void add_values(const float* p, const float* const* values, int64_t begin, int64_t end, int64_t column,
                       float* part, int64_t width) {
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kVecs; ++c) sums[r][c] = load(part + r * width + column + c * kLanes);
    for (int64_t j = begin; j < end; ++j) {
        Vec value[kVecs];
        for (int c = 0; c < kVecs; ++c) value[c] = load(values[j] + column + c * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vec weight = splat(p[r * kPartition + j]);
            for (int c = 0; c < kVecs; ++c) sums[r][c] = fma(weight, value[c], sums[r][c]);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kVecs; ++c) store(part + r * width + column + c * kLanes, sums[r][c]);
}

struct Range {
    int64_t begin, end;
};

// One column strip of all rows: rows in groups over the keys that all of the group see, each row's own ends apart.
template <int kVecs>
void add_values_strip(const float* p, const float* const* values, const Range* ranges, int64_t num_rows, int64_t column,
                      float* part, int64_t width) {
    int64_t r = 0;
    for (; r + kValueRows <= num_rows; r += kValueRows) {
        Range common = ranges[r];
        for (int i = 1; i < kValueRows; ++i) {
            common.begin = most(common.begin, ranges[r + i].begin);
            common.end = least(common.end, ranges[r + i].end);
        }
        if (common.begin >= common.end) {
            for (int i = 0; i < kValueRows; ++i)
                add_values<1, kVecs>(p + (r + i) * kPartition, values, ranges[r + i].begin, ranges[r + i].end, column,
                                     part + (r + i) * width, width);
            continue;
        }
        for (int i = 0; i < kValueRows; ++i)
            if (ranges[r + i].begin < common.begin)
                add_values<1, kVecs>(p + (r + i) * kPartition, values, ranges[r + i].begin, common.begin, column,
                                     part + (r + i) * width, width);
        add_values<kValueRows, kVecs>(p + r * kPartition, values, common.begin, common.end, column, part + r * width,
                                      width);
        for (int i = 0; i < kValueRows; ++i)
            if (common.end < ranges[r + i].end)
                add_values<1, kVecs>(p + (r + i) * kPartition, values, common.end, ranges[r + i].end, column,
                                     part + (r + i) * width, width);
    }
    for (; r < num_rows; ++r)
        add_values<1, kVecs>(p + r * kPartition, values, ranges[r].begin, ranges[r].end, column, part + r * width,
                             width);
}

// (peak, sum, out) of a row, merged with those of the next partition.
inline void merge(RowState* row, float* out, float peak, float sum, const float* part, int64_t width) {
    const float new_peak = peak > row->peak ? peak : row->peak;
    const float old_factor = exp_nonpositive(row->peak - new_peak), new_factor = exp_nonpositive(peak - new_peak);
    row->sum = row->sum * old_factor + sum * new_factor;
    row->peak = new_peak;
    const Vec old_scale = splat(old_factor), new_scale = splat(new_factor);
    for (int64_t c = 0; c < width; c += kLanes)
        store(out + c, fma(load(out + c), old_scale, mul(load(part + c), new_scale)));
}

template <typename T>
void attention_rows(const AttentionArgs& args, const AttentionUnit& unit, float* scratch_floats) {
    const Scratch scratch(args, scratch_floats);
    const int64_t group = args.num_heads / args.num_kv_heads;
    const int64_t start = args.query_starts[unit.seq], queries = args.query_starts[unit.seq + 1] - start;
    const int64_t first_position = args.seq_lens[unit.seq] - queries;
    const int64_t padded_rows = round_up(unit.num_rows, kTileRows);

    // A latent cache: the values are the first part of each key, and need not be located twice.
    const bool values_in_keys = args.values.data == args.keys.data && args.values.size <= args.keys.size &&
                                args.values.block_stride == args.keys.block_stride &&
                                args.values.slot_stride == args.keys.slot_stride &&
                                args.values.head_stride == args.keys.head_stride;

    RowState rows[kUnitRows];
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t r = 0; r < padded_rows; ++r) {
        float* q = scratch.q + r * scratch.key_width;
        if (r >= unit.num_rows) {
            for (int64_t d = 0; d < scratch.key_width; ++d) q[d] = 0.0f;
            continue;
        }
        const int64_t query = (unit.first_row + r) / group, head = unit.kv_head * group + (unit.first_row + r) % group;
        const int64_t position = first_position + query;
        int64_t first = 0;
        if (args.window) first = most(first, position - args.window + 1);
        if (args.chunk) first = most(first, position / args.chunk * args.chunk);
        rows[r] = {first, position + 1, kMinusInfinity, 0.0f};
        begin = least(begin, first);
        end = most(end, position + 1);
        widen_row(static_cast<const T*>(args.q) + (start + query) * args.q_row_stride + head * args.q_head_stride,
                  args.keys.size, q, scratch.key_width);
        for (int64_t c = 0; c < scratch.value_width; ++c) scratch.out[r * scratch.value_width + c] = 0.0f;
    }

    for (int64_t base = begin / kPartition * kPartition; base < end; base += kPartition) {
        const int64_t low = most(begin, base), high = least(end, base + kPartition);
        const float *keys[kPartition], *values[kPartition];
        for (int64_t j = 0; j < kPartition; ++j) keys[j] = scratch.zeros;
        locate<T>(args, unit, args.keys, base, low, high, scratch.keys, scratch.key_width, keys);
        if (values_in_keys)
            for (int64_t j = low - base; j < high - base; ++j) values[j] = keys[j];
        else
            locate<T>(args, unit, args.values, base, low, high, scratch.values, scratch.value_width, values);

        Range ranges[kUnitRows];
        for (int64_t r = 0; r < unit.num_rows; ++r) {
            ranges[r] = {most(rows[r].begin, base) - base, least(rows[r].end, base + kPartition) - base};
            if (ranges[r].begin >= ranges[r].end) ranges[r] = {0, 0};
        }
        for (int64_t j = (low - base) / kTileKeys * kTileKeys; j < high - base; j += kTileKeys)
            for (int64_t r = 0; r < padded_rows; r += kTileRows) {
                bool seen = false;
                for (int64_t i = r; i < least(r + kTileRows, unit.num_rows); ++i)
                    seen |= ranges[i].begin < j + kTileKeys && j < ranges[i].end;
                if (seen)
                    score_tile(scratch.q + r * scratch.key_width, scratch.key_width, keys + j, args.scale,
                               scratch.scores + r * kPartition + j);
            }

        float peaks[kUnitRows], sums[kUnitRows];
        for (int64_t r = 0; r < unit.num_rows; ++r) {
            float* part = scratch.part + r * scratch.value_width;
            for (int64_t c = 0; c < scratch.value_width; ++c) part[c] = 0.0f;
            if (ranges[r].end)
                softmax_part(scratch.scores + r * kPartition, ranges[r].begin, ranges[r].end, args.softcap, &peaks[r],
                             &sums[r]);
        }
        int64_t column = 0;
        for (; column + kValueVecs * kLanes <= scratch.value_width; column += kValueVecs * kLanes)
            add_values_strip<kValueVecs>(scratch.scores, values, ranges, unit.num_rows, column, scratch.part,
                                         scratch.value_width);
        for (; column < scratch.value_width; column += kLanes)
            add_values_strip<1>(scratch.scores, values, ranges, unit.num_rows, column, scratch.part,
                                scratch.value_width);
        for (int64_t r = 0; r < unit.num_rows; ++r)
            if (ranges[r].end)
                merge(&rows[r], scratch.out + r * scratch.value_width, peaks[r], sums[r],
                      scratch.part + r * scratch.value_width, scratch.value_width);
    }

    for (int64_t r = 0; r < unit.num_rows; ++r) {
        const int64_t query = (unit.first_row + r) / group, head = unit.kv_head * group + (unit.first_row + r) % group;
        float* out = scratch.out + r * scratch.value_width;
        float scale_out = 1.0f;
        if (args.sinks) {  // one more key, with no value
            const float sink = args.sinks[head], peak = sink > rows[r].peak ? sink : rows[r].peak;
            scale_out = exp_nonpositive(rows[r].peak - peak);
            rows[r].sum = rows[r].sum * scale_out + exp_nonpositive(sink - peak);
        }
        T* target = static_cast<T*>(args.out) + ((start + query) * args.num_heads + head) * args.values.size;
        for (int64_t c = 0; c < args.values.size; ++c) narrow(out[c] * scale_out / rows[r].sum, &target[c]);
    }
}

size_t attention_scratch_floats(const AttentionArgs& args) {
    return static_cast<size_t>(Scratch::floats(args));
}

void attention_unit(const AttentionArgs& args, const AttentionUnit& unit, float* scratch) {
    if (args.dtype == epruntime::DType::kFloat32)
        attention_rows<float>(args, unit, scratch);
    else
        attention_rows<uint16_t>(args, unit, scratch);
}

}  // namespace
