// Where a chunk of key tokens lies in the paged cache.

#pragma once

#include <algorithm>

#include "attention_args.h"

namespace pagedbatch {

//! Key tokens processed at once. A multiple of every LANES. A shared prefix is shared in whole chunks only.
constexpr int CHUNK = 64;
//! Tokens that lie together in a packed cache: one packed element of each key fills a cache line.
constexpr int GROUP = 16;

constexpr int round_up(int size, int to) { return (size + to - 1) / to * to; }

struct TokenLocations {
  int chunk = 0;            //!< position of the first token, a multiple of CHUNK
  int first = 0, last = 0;  //!< tokens [first, last) of the chunk are read
  int64_t offset[CHUNK];    //!< plain layout: of each token's key of KV head 0
  //! Packed layout: of each GROUP that is read, its block and the offset of its first token in the block.
  int32_t block[CHUNK / GROUP], block_offset[CHUNK / GROUP];
};

//! The keys of `item` in the chunk that begins at position `chunk`.
inline TokenLocations locate_tokens(const AttentionArgs& args, const WorkItem& item, int chunk) {
  TokenLocations tokens;
  tokens.chunk = chunk;
  tokens.first = std::max(item.begin - chunk, 0);
  tokens.last = std::min(item.end - chunk, CHUNK);
  if (args.cache.is_packed) {
    for (int i = tokens.first / GROUP; i * GROUP < tokens.last; ++i) {
      tokens.block[i] = item.block_table[(chunk + i * GROUP) / args.cache.block_size];
      tokens.block_offset[i] = (chunk + i * GROUP) % args.cache.block_size;
    }
    return tokens;
  }
  const int32_t* block = item.block_table + (chunk + tokens.first) / args.cache.block_size;
  const int64_t token_size = int64_t(args.cache.num_kv_heads) * args.cache.head_size;
  int block_offset = (chunk + tokens.first) % args.cache.block_size;
  for (int i = tokens.first; i < tokens.last; ++i) {
    tokens.offset[i] = *block * args.cache.block_stride + block_offset * token_size;
    if (++block_offset == args.cache.block_size) {
      block_offset = 0;
      ++block;
    }
  }
  return tokens;
}

}  // namespace pagedbatch
