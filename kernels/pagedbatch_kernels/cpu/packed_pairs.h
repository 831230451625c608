// Numbers 32 bits at a time: one float, or two bfloat16 whose products go into one float sum. Knows nothing of attention.
//
// Where the CPU multiplies bfloat16 (AVX512_BF16), that is one instruction for twice the products; elsewhere two on floats.

#pragma once

#include <algorithm>

#include "vec.h"

namespace pagedbatch {

//! Values of type T in 32 bits, the first in the lower half.
template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

inline Words broadcast(uint32_t word) { return word - Words{}; }

inline Words load(const uint32_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

inline void store(uint32_t* to, Words words) { std::memcpy(to, &words, sizeof words); }

//! Not inlined, as copying a variable count sends what surrounds it through memory.
template <class T>
__attribute__((noinline)) Words load_some_words(const T* from, int count) {
  Words words{};
  if (count > 0) std::memcpy(&words, from, count * sizeof(T));
  return words;
}

//! A register of `count` values, then zeros; nothing behind them is read, nothing at all if there are none.
template <class T>
Words load_words(const T* from, int count) {
  return count >= LANES * PER_WORD<T> ? load((const uint32_t*)from) : load_some_words(from, count);
}

template <class T>
void store_words(T* to, Words words, int count) {
  if (count >= LANES * PER_WORD<T>) return store((uint32_t*)to, words);
  std::memcpy(to, &words, count * sizeof(T));
}

//! The word of which each value is 1.
template <class T>
constexpr uint32_t ONES = sizeof(T) == sizeof(float) ? 0x3f800000 : 0x3f803f80;

//! The signs of a word's values.
template <class T>
constexpr uint32_t SIGNS = sizeof(T) == sizeof(float) ? 0x80000000 : 0x80008000;

//! `sum` and, in each lane, the products of the values in two words.
template <class T>
Vec multiply_add(Vec sum, Words one, Words other) {
  if constexpr (PER_WORD<T> == 1) {
    return multiply_add(sum, (Vec)one, (Vec)other);
  } else {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)one, (__m512bh)other);
#else
    sum = multiply_add(sum, (Vec)(one << 16), (Vec)(other << 16));
    return multiply_add(sum, (Vec)(one & 0xffff0000u), (Vec)(other & 0xffff0000u));
#endif
  }
}

//! Adds to a tile of sums what each of N rows has, the word that `word_of` gives, times what M registers of columns have.
template <class T, int N, int M, class WordOf>
__attribute__((always_inline)) inline void add_products(Vec (&sums)[N][M], const Words (&columns)[M], WordOf word_of) {
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    const Words word = broadcast(word_of(n));
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sums[n][m] = multiply_add<T>(sums[n][m], word, columns[m]);
  }
}

//! Registers of floats, each rounded to T, in one.
inline Words rounded(const Vec (&values)[1]) { return (Words)values[0]; }

inline Words rounded(const Vec (&values)[2]) {
  Words words;
#if defined(__AVX512BF16__)
  words = (Words)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
#else
  BFloat16 halves[2 * LANES];
  store(halves, values[0]);
  store(halves + LANES, values[1]);
  std::memcpy(&words, halves, sizeof words);
#endif
  return words;
}

template <int... LANE>
Words first_in_turn(Words one, Words other, std::integer_sequence<int, LANE...>) {
  return shuffle<(LANE % 2 * LANES + LANE / 2)...>(one, other);
}

template <int... LANE>
Words last_in_turn(Words one, Words other, std::integer_sequence<int, LANE...>) {
  return shuffle<(LANE % 2 * LANES + LANE / 2 + LANES / 2)...>(one, other);
}

//! Stores the pairs that two registers of bfloat16 make, an element of `one` before that of `other`: two registers.
inline void store_pairs(uint32_t* to, Words one, Words other) {
  const Words even = (one & 0xffffu) | (other << 16), odd = (one >> 16) | (other & 0xffff0000u);
  constexpr auto lanes = std::make_integer_sequence<int, LANES>();
  store(to, first_in_turn(even, odd, lanes));
  store(to + LANES, last_in_turn(even, odd, lanes));
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

}  // namespace pagedbatch
