// A chunk of tokens' keys and values as multiplying wants them: where they stand if the cache is packed, or packed first.
// Knows no query.
//
// A register holds the same word of LANES keys: each score is then a sum in one lane, in order, and all query rows use
// what was laid out once. Or LANES elements of a token's value, in bfloat16 each beside that of the next token.

#pragma once

#include <algorithm>
#include <vector>

#include "packing.h"
#include "tokens.h"
#include "words.h"

namespace pagedbatch {

//! One KV head of a chunk.
template <class T>
class Chunk {
 public:
  explicit Chunk(const Step& step)
      : step_(step),
        packing_(step),
        num_words_(round_up(step.cache.head_size, PER_WORD<T>) / PER_WORD<T>),
        key_stride_(step.cache.is_packed ? step.cache.block_size : CHUNK),
        halves_(2 * step.cache.head_size),
        ahead_(step.cache.is_packed ? 4 * CHUNK / GROUP * step.cache.head_size : 0) {}

  //! Words of a key.
  int num_words() const { return num_words_; }
  //! The first word of LANES keys from the `i`-th on, a multiple of LANES; `key_stride` words on, the next of each.
  const uint32_t* keys(int i) const { return keys_[i / LANES]; }
  int64_t key_stride() const { return key_stride_; }
  //! What token `i` has, or tokens `i` and `i + 1` in pairs, zero for one that is not read.
  const uint32_t* values(int i) const { return values_[i / PER_WORD<T>]; }

  //! Makes ready what `tokens` have for KV head `head`, and what comes `next` for `fetch`, to be called `times` times.
  void take(const Tokens& tokens, int head, const Tokens& next, int next_head, int times) {
    if (!step_.cache.is_packed) return packing_.pack(tokens, head, next, next_head, keys_, values_);
    find_keys(tokens, head);
    find_values(tokens, head);
    look_ahead(next, next_head, times);
  }

  //! Asks for a few cache lines of what comes next: many at once would wait for each other.
  __attribute__((always_inline)) void fetch() {
    if (line_ == last_line_) return;
    for (int i = 0; i < at_once_; ++i) __builtin_prefetch(line_[i], 0, 2);
    line_ += at_once_;
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

  void look_ahead(const Tokens& next, int head, int times) {
    const uint32_t** to = ahead_.data();
    for (int group = next.first / GROUP; group * GROUP < next.last; ++group) {
      const uint32_t *keys = key(next, group, head), *values = value(next, group, head);
      for (int i = 0; i < num_words_; ++i) *to++ = keys + i * key_stride_;
      for (int i = 0; i < num_words_; ++i) *to++ = values + i * GROUP;
    }
    line_ = ahead_.data();
    at_once_ = (to - line_ + times - 1) / times;
    last_line_ = line_ + round_up(to - line_, std::max(at_once_, 1));
    std::fill(to, last_line_, nullptr);
  }

  const Step& step_;
  Packing<T> packing_;
  const int num_words_;
  const int64_t key_stride_;
  const uint32_t* keys_[CHUNK / LANES];
  const uint32_t* values_[CHUNK];
  std::vector<uint32_t> halves_;        //!< [2][head_size], the first and the last pair where half of it is read
  std::vector<const uint32_t*> ahead_;  //!< cache lines of what comes next
  const uint32_t** line_ = nullptr;     //!< the next of them to ask for, `at_once_` at a time
  const uint32_t** last_line_ = nullptr;
  int at_once_ = 0;
};

}  // namespace pagedbatch
