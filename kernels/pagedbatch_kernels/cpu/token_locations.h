// Where a chunk of tokens stands in the paged cache. Knows no query and no element.

#pragma once

#include <algorithm>

#include "attention_args.h"

namespace pagedbatch {

//! Tokens taken at once. A multiple of every LANES; a larger one leaves more of a shared prefix to each row.
constexpr int CHUNK = 64;
//! Tokens that stand together in a packed cache, a cache line of a word of each key.
constexpr int GROUP = 16;

constexpr int round_up(int size, int to) { return (size + to - 1) / to * to; }

struct Tokens {
  int chunk = 0;            //!< the first one's number, a multiple of CHUNK
  int first = 0, last = 0;  //!< of the CHUNK tokens, those that are read
  int64_t offset[CHUNK];    //!< of each one's key of KV head 0, if the cache is not packed
  //! Of each GROUP that has one, if it is packed: its block, and its first place there.
  int32_t block[CHUNK / GROUP], place[CHUNK / GROUP];
};

//! The tokens of `piece` in the chunk that begins with number `chunk`.
inline Tokens find_tokens(const Step& step, const Piece& piece, int chunk) {
  Tokens tokens;
  tokens.chunk = chunk;
  tokens.first = std::max(piece.begin - chunk, 0);
  tokens.last = std::min(piece.end - chunk, CHUNK);
  if (step.cache.is_packed) {
    for (int i = tokens.first / GROUP; i * GROUP < tokens.last; ++i) {
      tokens.block[i] = piece.block_table[(chunk + i * GROUP) / step.cache.block_size];
      tokens.place[i] = (chunk + i * GROUP) % step.cache.block_size;
    }
    return tokens;
  }
  const int32_t* block = piece.block_table + (chunk + tokens.first) / step.cache.block_size;
  const int64_t token_size = int64_t(step.cache.num_kv_heads) * step.cache.head_size;
  int in_block = (chunk + tokens.first) % step.cache.block_size;
  for (int i = tokens.first; i < tokens.last; ++i) {
    tokens.offset[i] = *block * step.cache.block_stride + in_block * token_size;
    if (++in_block == step.cache.block_size) {
      in_block = 0;
      ++block;
    }
  }
  return tokens;
}

}  // namespace pagedbatch
