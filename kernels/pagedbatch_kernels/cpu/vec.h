// Vec: one SIMD register of LANES floats, with load, store, fmadd, exp, tanh and reductions.
//
// Built on the vector extensions of GCC and Clang: one source becomes AVX-512, AVX2, NEON or SSE code, depending on the
// compiler flags. Intrinsics are used only where no expression compiles to the instruction, with a portable fallback.
// -ffast-math is ruled out because masked scores are -inf. So is contraction: GCC fuses multiply and add in some loops
// and not in others, and the bits of a result would depend on the batch.

#pragma once

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace pagedbatch {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
//! The accumulator tile of a micro-kernel: TILE_ROWS rows by TILE_VECS registers. Of the 32 registers of AVX-512 and
//! NEON, or the 16 of AVX2, it leaves enough for TILE_VECS operands of one matrix and a broadcast of the other.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 6, TILE_VECS = 4;
#else
constexpr int TILE_ROWS = 4, TILE_VECS = 2;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecI32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t VecU32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t VecU16 __attribute__((vector_size(2 * LANES)));

constexpr float INF = std::numeric_limits<float>::infinity();

//! The upper half of a float's bits.
struct BFloat16 {
  uint16_t bits;
};

//! IEEE half precision. Only stored, never computed with.
struct Float16 {
  uint16_t bits;
};

inline bool is_finite(float value) { return value - value == 0.0f; }
inline bool is_finite(BFloat16 value) { return (value.bits & 0x7f80) != 0x7f80; }
inline bool is_finite(Float16 value) { return (value.bits & 0x7c00) != 0x7c00; }

template <class T>
constexpr T QUIET_NAN{0x7fc0};
template <>
inline constexpr float QUIET_NAN<float> = std::numeric_limits<float>::quiet_NaN();
template <>
inline constexpr Float16 QUIET_NAN<Float16>{0x7e00};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Vec broadcast(float value) { return value - Vec{}; }

inline VecI32 lane_indices() {
  VecI32 numbers;
  for (int lane = 0; lane < LANES; ++lane) numbers[lane] = lane;
  return numbers;
}

inline Vec load(const float* from) {
  Vec values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Vec load(const BFloat16* from) {
  VecU16 halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  return (Vec)((VecU32)_mm512_cvtepu16_epi32((__m256i)halves) << 16);  // GCC converts half a register at a time
#else
  return (Vec)(__builtin_convertvector(halves, VecU32) << 16);
#endif
}

//! Loads `count` values and zeros in the other lanes; reads no memory beyond them.
template <class T>
Vec load(const T* from, int count) {
  if (count >= LANES) return load(from);
  T padded[LANES] = {};
  for (int i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}

//! sum + one * other, with a single rounding where the CPU has FMA.
inline Vec fmadd(Vec sum, Vec one, Vec other) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)one, (float32x4_t)other);
#else
  return sum + one * other;
#endif
}

inline void store(float* to, Vec values) { std::memcpy(to, &values, sizeof values); }

//! Rounds to bfloat16 (nearest, ties to even, as torch does); the result is the upper half of each lane.
inline VecU32 round_to_bfloat16(Vec values) {
  const VecU32 bits = (VecU32)values;
  const VecU32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return values == values ? rounded : bits | 0x7fc00000;  // rounding up could carry a NaN over into the sign
}

inline void store(BFloat16* to, Vec values) {
#if defined(__AVX512BF16__)
  const VecU16 halves = (VecU16)_mm512_cvtneps_pbh((__m512)values);
#else
  const VecU16 halves = __builtin_convertvector(round_to_bfloat16(values) >> 16, VecU16);
#endif
  std::memcpy(to, &halves, sizeof halves);
}

template <class T>
void store(T* to, Vec values, int count) {
  if (count >= LANES) return store(to, values);
  T padded[LANES];
  store(padded, values);
  for (int i = 0; i < count; ++i) to[i] = padded[i];
}

//! Picks lanes of two registers by constant index; indices from LANES on mean `other`.
template <int... INDEX>
VecU32 shuffle(VecU32 one, VecU32 other) {
#if defined(__clang__)
  return __builtin_shufflevector(one, other, INDEX...);
#else
  return __builtin_shuffle(one, other, VecI32{INDEX...});
#endif
}

template <int STEP, int... LANE>
Vec xor_lanes(Vec values, std::integer_sequence<int, LANE...>) {
  return (Vec)shuffle<(LANE ^ STEP)...>((VecU32)values, (VecU32)values);
}

//! Combines all lanes, always in the same order.
template <int STEP = LANES / 2, class Combine>
float reduce(Vec values, Combine combine) {
  if constexpr (STEP == 0) {
    return values[0];
  } else {
    Vec others = xor_lanes<STEP>(values, std::make_integer_sequence<int, LANES>());
    return reduce<STEP / 2>(combine(values, others), combine);
  }
}

inline Vec max(Vec one, Vec other) { return one > other ? one : other; }

inline float reduce_sum(Vec values) {
  return reduce(values, [](Vec one, Vec other) { return one + other; });
}

inline float reduce_max(Vec values) { return reduce(values, max); }

inline bool any_gt(Vec values, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return reduce_max(values) > limit;
#endif
}

//! 2^f for 0 <= f <= 1, by a minimax polynomial. Relative error: 1e-7 for float, 7e-5 for a result that is then rounded
//! to bfloat16 (which itself is off by up to 2e-3).
template <class T>
Vec exp2_fraction(Vec f) {
  const auto with = [f](Vec power, float coefficient) { return fmadd(broadcast(coefficient), power, f); };
  if constexpr (sizeof(T) == sizeof(float)) {
    Vec power = with(broadcast(2.17022549e-4f), 1.24396880e-3f);
    power = with(power, 9.67884098e-3f);
    power = with(power, 5.54833420e-2f);
    power = with(power, 0.240229836f);
    power = with(power, 0.693146984f);
    return with(power, 1.0f);
  } else {
    Vec power = with(broadcast(7.802419e-2f), 0.22606721f);
    power = with(power, 0.69583374f);
    return with(power, 0.99992517f);
  }
}

constexpr float LOG2_E = 1.44269504f;

//! 2^x for x < 128, as 2^n * 2^f with n = floor(x). Error as in `exp2_fraction<T>`; exactly 0 for -inf; NaN stays NaN.
template <class T = float>
Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  // x - floor(x), 0 for -inf; scalef takes floor(x) from x itself.
  const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return (Vec)_mm512_scalef_ps((__m512)exp2_fraction<T>(f), (__m512)x);
#else
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Vec power = max(broadcast(-126.0f), x);
  const Vec shifted = power - 0.5f + magic;  // an integer x may give n = x - 1 and f = 1
  const Vec two_to_n = (Vec)(((VecI32)shifted - (VecI32)magic + 127) << 23);
  return power == -126.0f ? Vec{} : exp2_fraction<T>(power - (shifted - magic)) * two_to_n;
#endif
}

//! e^x for x < 88; see `exp2`.
template <class T = float>
Vec exp(Vec x) {
  return exp2<T>(x * LOG2_E);
}

inline Vec tanh(Vec x) {
  Vec size = x < 0.0f ? -x : x;
  Vec power = exp(-2.0f * size);
  Vec result = (1.0f - power) / (1.0f + power);
  return x < 0.0f ? -result : result;
}

//! Calls `body` with 1 <= n <= MAX as a compile-time constant, so that loops over it unroll into registers.
template <int MAX, class Body>
void dispatch_const(int n, Body body) {
  if (n == MAX) {
    body(std::integral_constant<int, MAX>());
  } else if constexpr (MAX > 1) {
    dispatch_const<MAX - 1>(n, body);
  }
}

}  // namespace pagedbatch
