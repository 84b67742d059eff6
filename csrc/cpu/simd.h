// One vector of fp32 lanes in the instruction set that the including file was compiled for.
//
// Every multiply-add is either `fma` or written as two roundings: with contraction off, the compiler cannot give one
// copy of an unrolled loop other bits than another.
#pragma once

#if !defined(EPRUNTIME_SIMD_PORTABLE)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

#if defined(EPRUNTIME_SIMD_AVX512)

constexpr int kLanes = 16;
using Vec = __m512;

inline Vec load(const float* p) {
    return _mm512_loadu_ps(p);
}
inline void store(float* p, Vec x) {
    _mm512_storeu_ps(p, x);
}
inline Vec splat(float x) {
    return _mm512_set1_ps(x);
}
inline Vec add(Vec a, Vec b) {
    return _mm512_add_ps(a, b);
}
inline Vec sub(Vec a, Vec b) {
    return _mm512_sub_ps(a, b);
}
inline Vec mul(Vec a, Vec b) {
    return _mm512_mul_ps(a, b);
}
inline Vec div(Vec a, Vec b) {
    return _mm512_div_ps(a, b);
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return _mm512_fmadd_ps(a, b, c);
}
// b where either is NaN.
inline Vec max(Vec a, Vec b) {
    return _mm512_max_ps(a, b);
}
inline Vec round_even(Vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec zero_where_less(Vec x, Vec bound, Vec y) {
    return _mm512_maskz_mov_ps(_knot_mask16(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ)), y);
}
inline Vec power_of_two(Vec n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
inline Vec magnitude(Vec x) {
    return _mm512_abs_ps(x);
}
inline Vec with_sign_of(Vec magnitude, Vec sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}

// The first `count` elements, zeros in the other lanes.
inline Vec load_first(const float* p, int64_t count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
}
// kLanes bf16 numbers, as bits in the low halves of the lanes.
inline __m512i load_halves(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i load_first_halves(const uint16_t* p, int64_t count) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p));
}
inline Vec load(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(load_halves(p), 16));
}
inline Vec load_first(const uint16_t* p, int64_t count) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(load_first_halves(p, count), 16));
}

// Lane i of x[j] and lane j of x[i] change places.
inline void transpose(Vec x[kLanes]) {
    Vec pair[16], quad[16];
    for (int i = 0; i < 8; ++i) {
        pair[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
        pair[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            const __m512d a = _mm512_castps_pd(pair[4 * i + j]), b = _mm512_castps_pd(pair[4 * i + 2 + j]);
            quad[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quad[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int i = 0; i < 4; ++i) {
        const Vec low0 = _mm512_shuffle_f32x4(quad[i], quad[4 + i], 0x88);
        const Vec low1 = _mm512_shuffle_f32x4(quad[i], quad[4 + i], 0xDD);
        const Vec high0 = _mm512_shuffle_f32x4(quad[8 + i], quad[12 + i], 0x88);
        const Vec high1 = _mm512_shuffle_f32x4(quad[8 + i], quad[12 + i], 0xDD);
        x[i] = _mm512_shuffle_f32x4(low0, high0, 0x88);
        x[4 + i] = _mm512_shuffle_f32x4(low1, high1, 0x88);
        x[8 + i] = _mm512_shuffle_f32x4(low0, high0, 0xDD);
        x[12 + i] = _mm512_shuffle_f32x4(low1, high1, 0xDD);
    }
}

// Lane i of the result is the sum of x[i]'s lanes, by the same tree for every i.
inline Vec sum_each(const Vec x[kLanes]) {
    Vec pair[8], quad[4], half[2];
    for (int i = 0; i < 8; ++i)
        pair[i] = add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pair[2 * i]), b = _mm512_castps_pd(pair[2 * i + 1]);
        quad[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; ++i)
        half[i] = add(_mm512_shuffle_f32x4(quad[2 * i], quad[2 * i + 1], 0x44),
                      _mm512_shuffle_f32x4(quad[2 * i], quad[2 * i + 1], 0xEE));
    return add(_mm512_shuffle_f32x4(half[0], half[1], 0x88), _mm512_shuffle_f32x4(half[0], half[1], 0xDD));
}

#elif defined(EPRUNTIME_SIMD_AVX2)

constexpr int kLanes = 8;
using Vec = __m256;

inline Vec load(const float* p) {
    return _mm256_loadu_ps(p);
}
inline void store(float* p, Vec x) {
    _mm256_storeu_ps(p, x);
}
inline Vec splat(float x) {
    return _mm256_set1_ps(x);
}
inline Vec add(Vec a, Vec b) {
    return _mm256_add_ps(a, b);
}
inline Vec sub(Vec a, Vec b) {
    return _mm256_sub_ps(a, b);
}
inline Vec mul(Vec a, Vec b) {
    return _mm256_mul_ps(a, b);
}
inline Vec div(Vec a, Vec b) {
    return _mm256_div_ps(a, b);
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return _mm256_fmadd_ps(a, b, c);
}
inline Vec max(Vec a, Vec b) {
    return _mm256_max_ps(a, b);
}
inline Vec round_even(Vec x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec zero_where_less(Vec x, Vec bound, Vec y) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, bound, _CMP_LT_OQ), y);
}
inline Vec power_of_two(Vec n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Vec magnitude(Vec x) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}
inline Vec with_sign_of(Vec magnitude, Vec sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}

inline Vec load_first(const float* p, int64_t count) {
    float lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
    return load(lanes);
}
inline Vec load(const uint16_t* p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vec load_first(const uint16_t* p, int64_t count) {
    uint16_t lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(uint16_t));
    return load(lanes);
}

inline void transpose(Vec x[kLanes]) {
    Vec pair[8], quad[8];
    for (int i = 0; i < 4; ++i) {
        pair[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
        pair[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            const __m256d a = _mm256_castps_pd(pair[4 * i + j]), b = _mm256_castps_pd(pair[4 * i + 2 + j]);
            quad[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            quad[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm256_permute2f128_ps(quad[i], quad[4 + i], 0x20);
        x[4 + i] = _mm256_permute2f128_ps(quad[i], quad[4 + i], 0x31);
    }
}

inline Vec sum_each(const Vec x[kLanes]) {
    Vec pair[4], quad[2];
    for (int i = 0; i < 4; ++i)
        pair[i] = add(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 2; ++i) {
        const __m256d a = _mm256_castps_pd(pair[2 * i]), b = _mm256_castps_pd(pair[2 * i + 1]);
        quad[i] = add(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    return add(_mm256_permute2f128_ps(quad[0], quad[1], 0x20), _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
}

#else

constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t VecInt __attribute__((vector_size(16)));

inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, Vec x) {
    std::memcpy(p, &x, sizeof x);
}
inline Vec splat(float x) {
    return Vec{x, x, x, x};
}
inline Vec add(Vec a, Vec b) {
    return a + b;
}
inline Vec sub(Vec a, Vec b) {
    return a - b;
}
inline Vec mul(Vec a, Vec b) {
    return a * b;
}
inline Vec div(Vec a, Vec b) {
    return a / b;
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return a * b + c;
}  // two roundings: contraction is off
inline Vec max(Vec a, Vec b) {
    return a > b ? a : b;
}
inline Vec round_even(Vec x) {
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: no fraction bits are left; |x| is under 2^22
    return (x + shift) - shift;
}
inline Vec zero_where_less(Vec x, Vec bound, Vec y) {
    return x < bound ? splat(0.0f) : y;
}
inline Vec power_of_two(Vec n) {
    const VecInt biased = (__builtin_convertvector(n, VecInt) + 127) << 23;
    Vec x;
    std::memcpy(&x, &biased, sizeof x);
    return x;
}
inline Vec magnitude(Vec x) {
    for (int i = 0; i < kLanes; ++i) x[i] = __builtin_fabsf(x[i]);
    return x;
}
inline Vec with_sign_of(Vec magnitude, Vec sign) {
    for (int i = 0; i < kLanes; ++i) magnitude[i] = __builtin_copysignf(magnitude[i], sign[i]);
    return magnitude;
}

inline Vec load_first(const float* p, int64_t count) {
    float lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
    return load(lanes);
}
inline Vec load(const uint16_t* p) {
    typedef uint16_t Halves __attribute__((vector_size(8)));
    Halves halves;
    std::memcpy(&halves, p, sizeof halves);
    const VecInt bits = __builtin_convertvector(halves, VecInt) << 16;
    Vec x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline Vec load_first(const uint16_t* p, int64_t count) {
    uint16_t lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(uint16_t));
    return load(lanes);
}

inline void transpose(Vec x[kLanes]) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = kept;
        }
}

inline Vec sum_each(const Vec x[kLanes]) {
    Vec y = splat(0.0f);
    for (int i = 0; i < kLanes; ++i) y[i] = (x[i][0] + x[i][2]) + (x[i][1] + x[i][3]);
    return y;
}

#endif

inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}
inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}
inline int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

inline float first_lane(Vec x) {
    float lanes[kLanes];
    store(lanes, x);
    return lanes[0];
}

inline float sum_lanes(Vec x) {
    Vec each[kLanes];
    for (int i = 0; i < kLanes; ++i) each[i] = x;
    return first_lane(sum_each(each));
}

inline float max_lanes(Vec x) {
    float lanes[kLanes];
    store(lanes, x);
    float peak = lanes[0];
    for (int i = 1; i < kLanes; ++i) peak = lanes[i] > peak ? lanes[i] : peak;
    return peak;
}

// exp(x) for x <= 0; 0 below -87, where exp(x) < 2e-38; NaN stays NaN. Within 2 units in the last place.
inline Vec exp_nonpositive(Vec x) {
    const Vec lowest = splat(-87.0f);
    const Vec bounded = max(lowest, x);
    const Vec n = round_even(mul(bounded, splat(1.44269504f)));
    Vec r = fma(n, splat(-0.693359375f), bounded);  // ln 2 in two parts: n times the first is exact
    r = fma(n, splat(2.12194440e-4f), r);
    Vec y = splat(1.0f / 5040);
    y = fma(y, r, splat(1.0f / 720));
    y = fma(y, r, splat(1.0f / 120));
    y = fma(y, r, splat(1.0f / 24));
    y = fma(y, r, splat(1.0f / 6));
    y = fma(y, r, splat(0.5f));
    y = fma(y, r, splat(1.0f));
    y = fma(y, r, splat(1.0f));
    return zero_where_less(x, lowest, mul(y, power_of_two(n)));
}

inline float exp_nonpositive(float x) {
    return first_lane(exp_nonpositive(splat(x)));
}

// cap * tanh(x / cap).
inline Vec soft_cap(Vec x, float cap) {
    x = div(x, splat(cap));
    const Vec e = exp_nonpositive(mul(magnitude(x), splat(-2.0f)));
    const Vec tanh = div(sub(splat(1.0f), e), add(splat(1.0f), e));
    return mul(with_sign_of(tanh, x), splat(cap));
}

inline float widen(float x) {
    return x;
}
inline float widen(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Round to nearest, ties to even; any NaN becomes the one that torch makes.
inline void narrow(float x, float* out) {
    *out = x;
}
inline void narrow(float x, uint16_t* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *out = x != x ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// `size` elements to fp32, zeros up to `padded`.
template <typename T>
inline void widen_row(const T* from, int64_t size, float* to, int64_t padded) {
    for (int64_t i = 0; i < size; ++i) to[i] = widen(from[i]);
    for (int64_t i = size; i < padded; ++i) to[i] = 0.0f;
}

}  // namespace
