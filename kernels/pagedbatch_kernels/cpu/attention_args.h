// The arguments of an attention call, field by field those of `backend.Step` in Python, and a piece of its work.

#pragma once

#include <cstdint>
#include <limits>

#include "layer_cache.h"

namespace pagedbatch {

constexpr int NO_WINDOW = std::numeric_limits<int32_t>::max();

//! See `interface.AttentionBatch` and `SharedPrefixes`; strides are in elements.
struct Step {
  const void* query;   // [num_tokens, num_heads, head_size], contiguous in the head
  void* output;        // the same, contiguous
  const float* sinks;  // [num_heads], or null
  LayerCache cache;
  const int32_t* block_tables;
  const int32_t* seq_lens;
  const int32_t* query_starts;
  const int32_t* prefix_tables;  // of runs; null with num_runs == 0
  const int32_t* prefix_lens;
  const int32_t* run_starts;
  const int32_t* seq_prefix_lens;
  int64_t token_stride, head_stride;  // of query
  int64_t table_width, prefix_table_width;
  int32_t num_seqs, num_runs, num_tokens;
  int32_t num_heads;
  int32_t window;  // tokens that a query sees, itself included, or NO_WINDOW
  float scale;
  float softcap;  // 0: none
  int32_t is_bfloat16;
  int32_t num_threads;
};

//! A tile of query tokens, some KV heads with their query heads, and the key tokens [begin, end) to read for them.
struct Piece {
  const int32_t* block_table;
  int first_token, num_tokens;
  int first_position;
  int kv_head, num_kv_heads;
  int begin, end;
  bool resumes;  //!< from a state that an earlier piece left
  bool stays;    //!< leaves its state for a later piece, and writes no output
};

}  // namespace pagedbatch
