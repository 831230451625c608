// Packed 32-bit elements: one float, or a pair of neighbouring bfloat16 as VNNI instructions take them.
//
// The dot product of two pairs is added to one float sum: one vdpbf16ps with AVX512_BF16, two float FMAs elsewhere.

#pragma once

#include <algorithm>

#include "vec.h"

namespace pagedbatch {

//! Values of type T in one packed element, the first in the lower half.
template <class T>
constexpr int PAIR = 4 / sizeof(T);

//! Packed elements per cache line.
constexpr int CACHE_LINE = 16;

inline VecU32 broadcast(uint32_t element) { return element - VecU32{}; }

inline VecU32 load(const uint32_t* from) {
  VecU32 packed;
  std::memcpy(&packed, from, sizeof packed);
  return packed;
}

inline void store(uint32_t* to, VecU32 packed) { std::memcpy(to, &packed, sizeof packed); }

//! Not inlined: a copy of variable length would spill the registers of the code around it.
template <class T>
__attribute__((noinline)) VecU32 load_partial(const T* from, int count) {
  VecU32 packed{};
  if (count > 0) std::memcpy(&packed, from, count * sizeof(T));
  return packed;
}

//! Loads `count` values (none if it is 0 or less) and zeros in the other lanes; reads no memory beyond them.
template <class T>
VecU32 load_packed(const T* from, int count) {
  return count >= LANES * PAIR<T> ? load((const uint32_t*)from) : load_partial(from, count);
}

template <class T>
void store_packed(T* to, VecU32 packed, int count) {
  if (count >= LANES * PAIR<T>) return store((uint32_t*)to, packed);
  std::memcpy(to, &packed, count * sizeof(T));
}

//! A packed element whose values are all 1.
template <class T>
constexpr uint32_t PACKED_ONE = sizeof(T) == sizeof(float) ? 0x3f800000 : 0x3f803f80;

//! The sign bits of a packed element.
template <class T>
constexpr uint32_t SIGN_BITS = sizeof(T) == sizeof(float) ? 0x80000000 : 0x80008000;

//! Per lane: `sum` plus the dot product of two packed elements.
template <class T>
Vec fmadd(Vec sum, VecU32 one, VecU32 other) {
  if constexpr (PAIR<T> == 1) {
    return fmadd(sum, (Vec)one, (Vec)other);
  } else {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)one, (__m512bh)other);
#else
    sum = fmadd(sum, (Vec)(one << 16), (Vec)(other << 16));
    return fmadd(sum, (Vec)(one & 0xffff0000u), (Vec)(other & 0xffff0000u));
#endif
  }
}

//! Outer product: acc[n][m] += packed_at(n) * columns[m], for N packed elements and M registers of them.
template <class T, int N, int M, class PackedAt>
__attribute__((always_inline)) inline void fma_tile(Vec (&acc)[N][M], const VecU32 (&columns)[M], PackedAt packed_at) {
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    const VecU32 element = broadcast(packed_at(n));
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) acc[n][m] = fmadd<T>(acc[n][m], element, columns[m]);
  }
}

//! Registers of floats, each rounded to T, in one.
inline VecU32 to_packed(const Vec (&values)[1]) { return (VecU32)values[0]; }

inline VecU32 to_packed(const Vec (&values)[2]) {
  VecU32 packed;
#if defined(__AVX512BF16__)
  packed = (VecU32)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
#else
  BFloat16 halves[2 * LANES];
  store(halves, values[0]);
  store(halves + LANES, values[1]);
  std::memcpy(&packed, halves, sizeof packed);
#endif
  return packed;
}

template <int... LANE>
VecU32 interleave_low(VecU32 one, VecU32 other, std::integer_sequence<int, LANE...>) {
  return shuffle<(LANE % 2 * LANES + LANE / 2)...>(one, other);
}

template <int... LANE>
VecU32 interleave_high(VecU32 one, VecU32 other, std::integer_sequence<int, LANE...>) {
  return shuffle<(LANE % 2 * LANES + LANE / 2 + LANES / 2)...>(one, other);
}

//! Stores two registers of bfloat16 interleaved: one[0], other[0], one[1], other[1] and so on.
inline void store_interleaved(uint32_t* to, VecU32 one, VecU32 other) {
  const VecU32 even = (one & 0xffffu) | (other << 16), odd = (one >> 16) | (other & 0xffff0000u);
  constexpr auto lanes = std::make_integer_sequence<int, LANES>();
  store(to, interleave_low(even, odd, lanes));
  store(to + LANES, interleave_high(even, odd, lanes));
}

//! One step of `transpose`: swaps the off-diagonal STEP x STEP squares of two registers that are STEP apart.
template <int STEP, int... LANE>
void transpose_step(VecU32& upper, VecU32& lower, std::integer_sequence<int, LANE...>) {
  VecU32 mixed = shuffle<(LANE & STEP ? LANES + LANE - STEP : LANE)...>(upper, lower);
  lower = shuffle<(LANE & STEP ? LANES + LANE : LANE + STEP)...>(upper, lower);
  upper = mixed;
}

//! Transposes a LANES x LANES matrix in log2(LANES) steps.
template <int STEP = LANES / 2>
inline void transpose(VecU32 (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int row = 0; row < LANES; ++row) {
    if (!(row & STEP)) transpose_step<STEP>(rows[row], rows[row + STEP], std::make_integer_sequence<int, LANES>());
  }
  if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

}  // namespace pagedbatch
