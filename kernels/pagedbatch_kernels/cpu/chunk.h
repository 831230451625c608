// A chunk of tokens: where their keys and values stand in the paged cache, and how they are laid out for multiplying.
// Knows no query.
//
// Keys are transposed, so that a register holds the same word of LANES keys: each score is then a sum in one lane, in
// order, and all query rows use what was laid out once. Values stay rows; in bfloat16 two tokens' are joined in pairs.

#pragma once

#include <algorithm>
#include <vector>

#include "step.h"
#include "words.h"

namespace pagedbatch {

//! Tokens taken at once. A multiple of every LANES; a larger one leaves more of a shared prefix to each row.
constexpr int CHUNK = 64;

constexpr int round_up(int size, int to) { return (size + to - 1) / to * to; }

//! Where a chunk's tokens stand.
struct Tokens {
  int chunk = 0;            //!< the first one's number, a multiple of CHUNK
  int first = 0, last = 0;  //!< of the CHUNK tokens, those that are read
  int64_t offset[CHUNK];    //!< of each one's first key of the piece in the layer's cache
};

//! The tokens of `piece` in the chunk that begins with number `chunk`.
inline Tokens find_tokens(const Step& step, const Piece& piece, int chunk) {
  Tokens tokens;
  tokens.chunk = chunk;
  tokens.first = std::max(piece.begin - chunk, 0);
  tokens.last = std::min(piece.end - chunk, CHUNK);
  const int32_t* block = piece.block_table + (chunk + tokens.first) / step.block_size;
  int in_block = (chunk + tokens.first) % step.block_size;
  for (int i = tokens.first; i < tokens.last; ++i) {
    const int64_t slot = int64_t(*block) * step.block_size + in_block;
    tokens.offset[i] = (slot * step.num_kv_heads + piece.kv_head) * step.head_size;
    if (++in_block == step.block_size) {
      in_block = 0;
      ++block;
    }
  }
  return tokens;
}

//! One KV head of a chunk.
template <class T>
class Chunk {
 public:
  explicit Chunk(const Step& step)
      : step_(step),
        value_offset_(step.num_blocks * step.block_size * step.num_kv_heads * step.head_size),
        num_words_(round_up(step.head_size, PER_WORD<T>) / PER_WORD<T>),
        width_(round_up(step.head_size, PER_WORD<T> * LANES)),
        packed_keys_(CHUNK * width_ / PER_WORD<T> / LANES),
        packed_values_(CHUNK / PER_WORD<T> * width_ / LANES) {}

  //! Words of a key.
  int num_words() const { return num_words_; }
  //! Words of a row of values, and floats of a sum over them: head_size, filled up to whole registers.
  int width() const { return width_; }

  //! The `word` of each of the CHUNK keys, for those that were packed; the rest of their registers is zero.
  const uint32_t* keys(int word) const { return (const uint32_t*)packed_keys_.data() + word * CHUNK; }
  //! What token `i` has, or tokens `i` and `i + 1` in pairs, zero for one that was not packed.
  const uint32_t* values(int i) const { return values_[i / PER_WORD<T>]; }

  //! Lays out what `tokens` have for KV head `head` of the piece; meanwhile what comes `next` is on its way from memory.
  void pack(const Tokens& tokens, int head, const Tokens& next, int next_head) {
    pack_keys(tokens, key_of(head), next, key_of(next_head));
    pack_values(tokens, key_of(head) + value_offset_, next, key_of(next_head) + value_offset_);
  }

 private:
  static constexpr int PER_REGISTER = LANES * PER_WORD<T>;

  const T* key_of(int head) const { return (const T*)step_.layer_cache + head * step_.head_size; }

  //! Inlined by force: GCC takes a function that only prefetches for one without effect, and drops the calls.
  __attribute__((always_inline)) void prefetch(const Tokens& next, int begin, int count, const T* from) const {
    for (int i = std::max(begin, next.first); i < std::min(begin + count, next.last); ++i) {
      for (int d = 0; d < step_.head_size; d += 64 / sizeof(T)) __builtin_prefetch(from + next.offset[i] + d, 0, 2);
    }
  }

  void pack_keys(const Tokens& tokens, const T* keys, const Tokens& next, const T* next_keys) {
    for (int group = 0; group < CHUNK; group += LANES) {
      prefetch(next, group, LANES, next_keys);
      if (group + LANES <= tokens.first || group >= tokens.last) continue;
      const bool all_tokens = group >= tokens.first && group + LANES <= tokens.last;
      for (int d = 0; d < step_.head_size; d += PER_REGISTER) {
        Words words[LANES];
        if (all_tokens && d + PER_REGISTER <= step_.head_size) {
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
          store((uint32_t*)packed_keys_.data() + (d / PER_WORD<T> + lane) * CHUNK + group, words[lane]);
        }
      }
    }
  }

  void pack_values(const Tokens& tokens, const T* values, const Tokens& next, const T* next_values) {
    for (int i = 0; i < CHUNK; i += PER_WORD<T>) {
      prefetch(next, i, PER_WORD<T>, next_values);
      if (i + PER_WORD<T> <= tokens.first || i >= tokens.last) continue;
      uint32_t* row = (uint32_t*)packed_values_.data() + i / PER_WORD<T> * width_;
      values_[i / PER_WORD<T>] = row;
      if constexpr (PER_WORD<T> == 2) {
        for (int d = 0; d < step_.head_size; d += PER_REGISTER) {
          const Words one = words_of(tokens, i, values, d), other = words_of(tokens, i + 1, values, d);
          store(row + d, even_pairs(one, other));
          store(row + d + LANES, odd_pairs(one, other));
        }
      } else if (width_ == step_.head_size) {
        values_[i] = (const uint32_t*)(values + tokens.offset[i]);
      } else {
        for (int d = 0; d < step_.head_size; d += LANES) store(row + d, words_of(tokens, i, values, d));
      }
    }
  }

  //! A register of what token `i` has from element `d` on; a token outside the piece may not be read.
  Words words_of(const Tokens& tokens, int i, const T* from, int d) const {
    const bool inside = i >= tokens.first && i < tokens.last;
    return inside ? load_words(from + tokens.offset[i] + d, step_.head_size - d) : Words{};
  }

  const Step& step_;
  const int64_t value_offset_;  //!< from a key to its value
  const int num_words_, width_;
  std::vector<Words> packed_keys_;    //!< [num_words, to whole registers][CHUNK]
  std::vector<Words> packed_values_;  //!< [CHUNK / PER_WORD][width]
  const uint32_t* values_[CHUNK];     //!< rows of `packed_values_`, or of the cache where they lie there as needed
};

}  // namespace pagedbatch
