// A chunk of tokens' keys and values as multiplying wants them: where they stand if the cache is packed, or packed first.
// Knows no query.
//
// A register holds the same word of LANES keys: each score is then a sum in one lane, in order, and all query rows use
// what was laid out once. Or LANES elements of a token's value, in bfloat16 each beside that of the next token.

#pragma once

#include <algorithm>
#include <vector>

#include "pack_chunk.h"
#include "token_locations.h"
#include "packed_pairs.h"

namespace pagedbatch {

//! How often rows pass over the words of a chunk's keys, a panel of tokens at a time; and over as many of its values.
constexpr int ROUNDS = CHUNK / (PANEL * LANES);

//! One KV head of a chunk.
template <class T>
class Chunk {
 public:
  explicit Chunk(const Step& step)
      : step_(step),
        packing_(step),
        num_words_(round_up(step.cache.head_size, PER_WORD<T>) / PER_WORD<T>),
        key_stride_(step.cache.is_packed ? step.cache.block_size : CHUNK),
        last_line_(GROUP / PER_WORD<T> * step.cache.head_size - GROUP),
        halves_(2 * step.cache.head_size) {}

  //! Words of a key.
  int num_words() const { return num_words_; }
  //! The first word of LANES keys from the `i`-th on, a multiple of LANES; `key_stride` words on, the next of each.
  const uint32_t* keys(int i) const { return keys_[i / LANES]; }
  int64_t key_stride() const { return key_stride_; }
  //! What token `i` has, or tokens `i` and `i + 1` in pairs, zero for one that is not read.
  const uint32_t* values(int i) const { return values_[i / PER_WORD<T>]; }

  //! Makes ready what `tokens` have for KV head `head`, and what comes `next` for `fetch_share`.
  void take(const Tokens& tokens, int head, const Tokens& next, int next_head) {
    if (!step_.cache.is_packed) return packing_.pack(tokens, head, next, next_head, keys_, values_);
    find_keys(tokens, head);
    find_values(tokens, head);
    look_ahead(next, next_head);
  }

  //! Of what comes next, leaves the `i`-th of `count` parts for `fetch_keys` and `fetch_values`.
  void fetch_share(int i, int count) {
    const int size = (CHUNK / GROUP + count - 1) / count;
    begin_ahead_ = std::min(i * size, num_ahead_);
    end_ahead_ = std::min(begin_ahead_ + size, num_ahead_);
  }

  //! Asks for a line of each group of the part, as many at once would wait for each other: that with word `i` of keys, or
  //! the `i`-th of values. In ROUNDS, each of which takes every so many-th group.
  __attribute__((always_inline)) void fetch_keys(int i, int round) const {
    for (int group = begin_ahead_ + round; group < end_ahead_; group += ROUNDS) {
      __builtin_prefetch(keys_ahead_[group] + i * key_stride_, 0, 2);
    }
  }
  __attribute__((always_inline)) void fetch_values(int i, int round) const {
    for (int group = begin_ahead_ + round; group < end_ahead_; group += ROUNDS) {
      __builtin_prefetch(values_ahead_[group] + std::min(i * GROUP, last_line_), 0, 2);
    }
  }

 private:
  // Of a packed cache.

  //! A block's part of one KV head.
  const T* keys_of(const Tokens& tokens, int group, int head) const {
    return (const T*)step_.cache.data + tokens.block[group] * step_.cache.block_stride +
           int64_t(head) * step_.cache.block_size * step_.cache.head_size;
  }
  const uint32_t* key(const Tokens& tokens, int group, int head) const {
    return (const uint32_t*)keys_of(tokens, group, head) + tokens.place[group];
  }
  const uint32_t* value(const Tokens& tokens, int group, int head) const {
    const T* values = keys_of(tokens, group, head) + step_.cache.value_offset;
    return (const uint32_t*)(values + int64_t(tokens.place[group]) * step_.cache.head_size);
  }

  void find_keys(const Tokens& tokens, int head) {
    for (int group = tokens.first / GROUP; group * GROUP < tokens.last; ++group) {
      const uint32_t* from = key(tokens, group, head);
      for (int i = 0; i < GROUP; i += LANES) keys_[(group * GROUP + i) / LANES] = from + i;
    }
  }

  void find_values(const Tokens& tokens, int head) {
    for (int group = tokens.first / GROUP; group * GROUP < tokens.last; ++group) {
      const uint32_t* from = value(tokens, group, head);
      for (int i = 0; i < GROUP / PER_WORD<T>; ++i) {
        values_[group * GROUP / PER_WORD<T> + i] = from + i * step_.cache.head_size;
      }
    }
    if (tokens.first % PER_WORD<T>) take_half(tokens.first - 1, 0xffff0000u, halves_.data());
    if (tokens.last % PER_WORD<T>) take_half(tokens.last - 1, 0x0000ffffu, halves_.data() + step_.cache.head_size);
  }

  //! Takes one token of a pair: the other may be anything, and a weight of zero would not help against NaN.
  void take_half(int i, uint32_t mask, uint32_t* half) {
    const uint32_t*& pairs = values_[i / PER_WORD<T>];
    for (int d = 0; d < step_.cache.head_size; ++d) half[d] = pairs[d] & mask;
    pairs = half;
  }

  void look_ahead(const Tokens& next, int head) {
    num_ahead_ = 0;
    for (int group = next.first / GROUP; group * GROUP < next.last; ++group) {
      keys_ahead_[num_ahead_] = key(next, group, head);
      values_ahead_[num_ahead_++] = value(next, group, head);
    }
  }

  const Step& step_;
  Packing<T> packing_;
  const int num_words_;
  const int64_t key_stride_;
  const int last_line_;  //!< where the last line of a group's values begins
  const uint32_t* keys_[CHUNK / LANES];
  const uint32_t* values_[CHUNK];
  std::vector<uint32_t> halves_;  //!< [2][head_size], the first and the last pair where half of it is read
  // Of each GROUP of what comes next.
  const uint32_t* keys_ahead_[CHUNK / GROUP];
  const uint32_t* values_ahead_[CHUNK / GROUP];
  int num_ahead_ = 0;
  int begin_ahead_ = 0, end_ahead_ = 0;  //!< those to ask for now
};

}  // namespace pagedbatch
