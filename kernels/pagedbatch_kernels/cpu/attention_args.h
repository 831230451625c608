// The arguments of an attention call, and the work items that it is cut into.

#pragma once

#include <cstdint>
#include <limits>

#include "layer_cache.h"

namespace pagedbatch {

constexpr int NO_WINDOW = std::numeric_limits<int32_t>::max();

//! The tensors of `interface.AttentionBatch` and `SharedPrefixes`; strides are in elements of T, float or bfloat16.
struct AttentionArgs {
  const void* query;   // [num_tokens, num_heads, head_size], contiguous in the last dimension
  void* output;        // [num_tokens, num_heads, head_size], contiguous
  const float* sinks;  // [num_heads], or null
  const float* position_bias;  // [num_heads, 2 * bias_reach - 1], or null: see position_bias.h
  LayerCache cache;
  const int32_t* block_tables;     // [num_seqs, table_width]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* prefix_tables;    // [num_prefixes, prefix_table_width]; this and the next three: null without prefixes
  const int32_t* prefix_lens;      // [num_prefixes]
  const int32_t* prefix_start_loc; // [num_prefixes + 1], the query tokens that share each prefix
  const int32_t* seq_prefix_lens;  // [num_seqs]
  int64_t token_stride, head_stride;  // of query
  int64_t table_width, prefix_table_width;
  int32_t num_seqs, num_prefixes, num_tokens;
  int32_t num_heads;
  int32_t window;  // tokens that a query attends to, itself included, or NO_WINDOW
  int32_t bias_reach;
  float scale;
  float softcap;  // 0: none
  int32_t is_causal;  // each query token sees the keys up to itself, otherwise all
  int32_t is_bfloat16;
  int32_t num_threads;
};

//! A tile of query tokens, the query heads of some KV heads, and the keys to attend to.
struct WorkItem {
  const int32_t* block_table;
  int first_token, num_tokens;  //!< query tokens [first_token, first_token + num_tokens) of the batch
  int first_position;           //!< of the first token in its sequence; of use only if `is_causal` or with a bias
  int begin, end;               //!< keys [begin, end) of the sequence
  bool is_causal;               //!< a query token sees no key after itself
  bool loads_state;             //!< continues from the softmax state that an earlier item stored
  bool stores_state;            //!< stores its softmax state for a later item, and writes no output
  int kv_head = 0, num_kv_heads = 0;
};

}  // namespace pagedbatch
