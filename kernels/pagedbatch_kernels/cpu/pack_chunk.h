// Packs a chunk of tokens from a cache that is kept in rows, as multiplying wants it: see layer_cache.h.

#pragma once

#include <algorithm>
#include <vector>

#include "token_locations.h"
#include "packed_pairs.h"

namespace pagedbatch {

//! Room for one packed chunk, where the cache is not packed itself.
template <class T>
class Packing {
 public:
  explicit Packing(const Step& step)
      : step_(step),
        width_(round_up(step.cache.head_size, PER_REGISTER)),
        keys_(step.cache.is_packed ? 0 : CHUNK * width_ / PER_REGISTER),
        values_(step.cache.is_packed ? 0 : CHUNK / PER_WORD<T> * width_ / LANES) {}

  //! Packs one KV head: `keys` get a pointer for every LANES tokens, CHUNK words from one word of a key to the next,
  //! and `values` one for each token, or each two. What comes `next` is on its way from memory meanwhile.
  void pack(const Tokens& tokens, int head, const Tokens& next, int next_head, const uint32_t** keys,
            const uint32_t** values) {
    pack_keys(tokens, row(head), next, row(next_head));
    pack_values(tokens, row(head) + step_.cache.value_offset, next, row(next_head) + step_.cache.value_offset, values);
    for (int i = 0; i < CHUNK; i += LANES) keys[i / LANES] = (const uint32_t*)keys_.data() + i;
  }

 private:
  static constexpr int PER_REGISTER = LANES * PER_WORD<T>;

  const T* row(int head) const { return (const T*)step_.cache.data + head * step_.cache.head_size; }

  //! Inlined by force: GCC takes a function that only prefetches for one without effect, and drops the calls.
  __attribute__((always_inline)) void prefetch(const Tokens& next, int begin, int count, const T* from) const {
    for (int i = std::max(begin, next.first); i < std::min(begin + count, next.last); ++i) {
      for (int d = 0; d < step_.cache.head_size; d += 64 / sizeof(T)) __builtin_prefetch(from + next.offset[i] + d, 0, 2);
    }
  }

  void pack_keys(const Tokens& tokens, const T* keys, const Tokens& next, const T* next_keys) {
    for (int group = 0; group < CHUNK; group += LANES) {
      prefetch(next, group, LANES, next_keys);
      if (group + LANES <= tokens.first || group >= tokens.last) continue;
      const bool all_tokens = group >= tokens.first && group + LANES <= tokens.last;
      for (int d = 0; d < step_.cache.head_size; d += PER_REGISTER) {
        Words words[LANES];
        if (all_tokens && d + PER_REGISTER <= step_.cache.head_size) {
#pragma GCC unroll 16
          for (int lane = 0; lane < LANES; ++lane) {
            words[lane] = load_words(keys + tokens.offset[group + lane] + d, PER_REGISTER);
          }
        } else {
          for (int lane = 0; lane < LANES; ++lane) words[lane] = words_of(tokens, group + lane, keys, d);
        }
        transpose(words);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; ++lane) {
          store((uint32_t*)keys_.data() + (d / PER_WORD<T> + lane) * CHUNK + group, words[lane]);
        }
      }
    }
  }

  void pack_values(const Tokens& tokens, const T* values, const Tokens& next, const T* next_values,
                   const uint32_t** rows) {
    for (int i = 0; i < CHUNK; i += PER_WORD<T>) {
      prefetch(next, i, PER_WORD<T>, next_values);
      if (i + PER_WORD<T> <= tokens.first || i >= tokens.last) continue;
      uint32_t* row = (uint32_t*)values_.data() + i / PER_WORD<T> * width_;
      rows[i / PER_WORD<T>] = row;
      if constexpr (PER_WORD<T> == 2) {
        for (int d = 0; d < step_.cache.head_size; d += PER_REGISTER) {
          store_pairs(row + d, words_of(tokens, i, values, d), words_of(tokens, i + 1, values, d));
        }
      } else if (width_ == step_.cache.head_size) {
        rows[i] = (const uint32_t*)(values + tokens.offset[i]);
      } else {
        for (int d = 0; d < step_.cache.head_size; d += LANES) store(row + d, words_of(tokens, i, values, d));
      }
    }
  }

  //! A register of what token `i` has from element `d` on; a token outside the piece may not be read.
  Words words_of(const Tokens& tokens, int i, const T* from, int d) const {
    const bool inside = i >= tokens.first && i < tokens.last;
    return inside ? load_words(from + tokens.offset[i] + d, step_.cache.head_size - d) : Words{};
  }

  const Step& step_;
  const int width_;            //!< of a packed row of values
  std::vector<Words> keys_;    //!< [words of a key, to whole registers][CHUNK]
  std::vector<Words> values_;  //!< [CHUNK / PER_WORD][width]
};

}  // namespace pagedbatch
