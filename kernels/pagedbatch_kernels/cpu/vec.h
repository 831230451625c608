// One machine register of floats and what the attention kernel does with it. Knows nothing of attention.
//
// GCC's and Clang's vector types: the same source is AVX-512, AVX2, NEON or plain SSE code, by the flags that it is built
// with. Intrinsics stand only where no expression finds the instruction, beside code that does without. There must be no
// -ffast-math, as masked scores are -inf, and no contraction: a compiler that fuses a product into a sum here and not
// there, as GCC does in loops for AVX2, makes a row's bits depend on its batch.

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
//! A tile of accumulators in registers: of ROWS query rows by up to PANEL registers of keys or of elements. It leaves room
//! for a panel and one more, of the 32 registers of AVX-512 and NEON or of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 6, PANEL = 4;
#else
constexpr int ROWS = 4, PANEL = 2;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

constexpr float INFINITE = std::numeric_limits<float>::infinity();

//! A bfloat16 is the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

//! A half float, which is stored and nothing else.
struct Float16 {
  uint16_t bits;
};

inline bool is_finite(float value) { return value - value == 0.0f; }
inline bool is_finite(BFloat16 value) { return (value.bits & 0x7f80) != 0x7f80; }
inline bool is_finite(Float16 value) { return (value.bits & 0x7c00) != 0x7c00; }

template <class T>
constexpr T NOT_A_NUMBER{0x7fc0};
template <>
inline constexpr float NOT_A_NUMBER<float> = std::numeric_limits<float>::quiet_NaN();
template <>
inline constexpr Float16 NOT_A_NUMBER<Float16>{0x7e00};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Vec broadcast(float value) { return value - Vec{}; }

inline Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < LANES; ++lane) numbers[lane] = lane;
  return numbers;
}

inline Vec load(const float* from) {
  Vec values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Vec load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
  return (Vec)((Words)_mm512_cvtepu16_epi32((__m256i)halves) << 16);  // GCC converts half a register at a time
#else
  return (Vec)(__builtin_convertvector(halves, Words) << 16);
#endif
}

//! `count` values, then zeros; nothing behind them is read.
template <class T>
Vec load(const T* from, int count) {
  if (count >= LANES) return load(from);
  T padded[LANES] = {};
  for (int i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}

//! sum + one * other, rounded once where the CPU can.
inline Vec multiply_add(Vec sum, Vec one, Vec other) {
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

//! Each value rounded to bfloat16, to nearest, ties to even, as torch does: the upper half of a word.
inline Words round_to_bfloat16(Vec values) {
  const Words bits = (Words)values;
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return values == values ? rounded : bits | 0x7fc00000;  // rounding up could carry a NaN over into the sign
}

inline void store(BFloat16* to, Vec values) {
#if defined(__AVX512BF16__)
  const Halves halves = (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
  const Halves halves = __builtin_convertvector(round_to_bfloat16(values) >> 16, Halves);
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

//! Lanes of two registers by constant index; those of the second count from LANES on.
template <int... INDEX>
Words shuffle(Words one, Words other) {
#if defined(__clang__)
  return __builtin_shufflevector(one, other, INDEX...);
#else
  return __builtin_shuffle(one, other, Ints{INDEX...});
#endif
}

template <int STEP, int... LANE>
Vec from_lanes_apart(Vec values, std::integer_sequence<int, LANE...>) {
  return (Vec)shuffle<(LANE ^ STEP)...>((Words)values, (Words)values);
}

//! Combines all lanes, in an order that is always the same.
template <int STEP = LANES / 2, class Combine>
float reduce(Vec values, Combine combine) {
  if constexpr (STEP == 0) {
    return values[0];
  } else {
    Vec others = from_lanes_apart<STEP>(values, std::make_integer_sequence<int, LANES>());
    return reduce<STEP / 2>(combine(values, others), combine);
  }
}

inline Vec larger(Vec one, Vec other) { return one > other ? one : other; }

inline float sum(Vec values) {
  return reduce(values, [](Vec one, Vec other) { return one + other; });
}

inline float largest(Vec values) { return reduce(values, larger); }

inline bool any_above(Vec values, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return largest(values) > limit;
#endif
}

//! 2^f for 0 <= f <= 1, by a polynomial fitted for the least relative error: 1e-7, or 7e-5 for what is then rounded to
//! bfloat16, by up to 2e-3.
template <class T>
Vec two_to_fraction(Vec f) {
  const auto with = [f](Vec power, float coefficient) { return multiply_add(broadcast(coefficient), power, f); };
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

//! 2^x for x < 128, as exact as `two_to_fraction<T>`; exactly 0 for -inf, and NaN stays NaN.
//!
//! 2^(n + f) with n whole: 2^f, times 2^n.
template <class T = float>
Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  // What is left of x over the whole number below it, 0 for -inf; that number scalef takes from x itself.
  const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return (Vec)_mm512_scalef_ps((__m512)two_to_fraction<T>(f), (__m512)x);
#else
  const Vec whole = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers, left in the low bits
  const Vec power = larger(broadcast(-126.0f), x);
  const Vec shifted = power - 0.5f + whole;  // whole numbers may become the one below, and f 1
  const Vec two_to_n = (Vec)(((Ints)shifted - (Ints)whole + 127) << 23);
  return power == -126.0f ? Vec{} : two_to_fraction<T>(power - (shifted - whole)) * two_to_n;
#endif
}

//! e^x for x < 88, otherwise like `exp2`.
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

//! Calls `body` with `n`, 1 <= n <= MOST, as a constant: loops over it become straight code in registers.
template <int MOST, class Body>
void with_constant(int n, Body body) {
  if (n == MOST) {
    body(std::integral_constant<int, MOST>());
  } else if constexpr (MOST > 1) {
    with_constant<MOST - 1>(n, body);
  }
}

}  // namespace pagedbatch
