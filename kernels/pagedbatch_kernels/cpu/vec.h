// One machine register of floats and what the attention kernel does with it. Knows nothing of attention.
//
// GCC's and Clang's vector types, not intrinsics: the same source is AVX-512, AVX2, NEON or plain SSE code, by the
// flags that it is built with. There must be no -ffast-math: masked scores are -inf.

#pragma once

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
//! Registers that one side of a tile of accumulators may span: 16 accumulators where there are 32 registers, else 8.
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int PANEL = 2;
#else
constexpr int PANEL = 4;
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
  return (Vec)(__builtin_convertvector(halves, Words) << 16);
}

//! `count` values, then zeros; nothing behind them is read.
template <class T>
Vec load(const T* from, int count) {
  if (count >= LANES) return load(from);
  T padded[LANES] = {};
  for (int i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}

inline void store(float* to, Vec values) { std::memcpy(to, &values, sizeof values); }

//! Rounds to nearest, ties to even, as torch does.
inline void store(BFloat16* to, Vec values) {
  Words bits = (Words)values;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Words nan = rounded | 0x7fc0;  // rounding up could carry a NaN over into the sign
  Halves halves = __builtin_convertvector(values == values ? rounded : nan, Halves);
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

//! One step of a transposition: swaps the squares of side STEP that lie across the diagonal of two rows STEP apart.
template <int STEP, int... LANE>
void exchange(Words& upper, Words& lower, std::integer_sequence<int, LANE...>) {
  Words mixed = shuffle<(LANE & STEP ? LANES + LANE - STEP : LANE)...>(upper, lower);
  lower = shuffle<(LANE & STEP ? LANES + LANE : LANE + STEP)...>(upper, lower);
  upper = mixed;
}

//! Transposes LANES registers as a square matrix, in log2(LANES) steps.
template <int STEP = LANES / 2>
inline void transpose(Words (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int row = 0; row < LANES; ++row) {
    if (!(row & STEP)) exchange<STEP>(rows[row], rows[row + STEP], std::make_integer_sequence<int, LANES>());
  }
  if constexpr (STEP > 1) transpose<STEP / 2>(rows);
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

//! e^x for x <= 0, to 2e-7 of itself near 0; exactly 0 from -87 on, -inf included. NaN stays NaN.
//!
//! 2^(n + f) with n whole and |f| <= 1/2: a polynomial for 2^f, fitted for the least relative error, times 2^n.
inline Vec exp_negative(Vec x) {
  const Vec whole = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers, left in the low bits
  const Vec inside = x < -87.0f ? broadcast(-87.0f) : x;
  const Vec shifted = inside * 1.44269504f + whole;
  const Vec f = inside * 1.44269504f - (shifted - whole);
  Vec power = f * 1.5345811572976245e-4f + 1.3399931215286685e-3f;
  power = power * f + 9.618488958696879e-3f;
  power = power * f + 5.550328776976868e-2f;
  power = power * f + 0.2402264689061961f;
  power = power * f + 0.6931472057372599f;
  power = power * f + 1.0f;
  const Vec two_to_n = (Vec)(((Ints)shifted - (Ints)whole + 127) << 23);
  return x < -87.0f ? Vec{} : power * two_to_n;
}

inline Vec tanh(Vec x) {
  Vec size = x < 0.0f ? -x : x;
  Vec power = exp_negative(-2.0f * size);
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
