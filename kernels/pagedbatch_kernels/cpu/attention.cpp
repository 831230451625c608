// Paged attention: output = softmax(scale * Q * K^T + bias) * V for a ragged batch of query tokens.
//
// Q and output are [num_tokens, num_heads, head_size]; K and V lie in the paged cache (layer_cache.h), and query head h
// reads KV head h / (num_heads / num_kv_heads). float or bfloat16, computed in float. This file cuts a batch into work
// items and runs them on threads; attention_tile.h computes one.
//
// A query's bits do not depend on its batch: keys are taken in chunks that begin at multiples of CHUNK tokens, each in
// a fixed order, and a shared prefix ends at such a boundary, where the query's own item continues from the stored
// state.

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention_tile.h"
#include "export.h"

namespace pagedbatch {
namespace {

//! Query rows (tokens x query heads per KV head) per item: enough to outweigh the fixed cost of a chunk, and few enough
//! that each thread gets several items.
constexpr int MIN_ITEM_ROWS = 64, MAX_ITEM_ROWS = 192;

int rows_per_item(const AttentionArgs& args) {
  const int64_t num_rows = int64_t(args.num_tokens) * args.num_heads;
  return num_rows >= int64_t(8) * MAX_ITEM_ROWS * args.num_threads ? MAX_ITEM_ROWS : MIN_ITEM_ROWS;
}

//! Cuts an item that covers a range of query tokens and all KV heads into items of a good size.
void add_work_items(const AttentionArgs& args, const WorkItem& range, std::vector<WorkItem>& items) {
  const int queries_per_kv = args.num_heads / args.cache.num_kv_heads;
  const int tile_tokens = std::max(1, rows_per_item(args) / queries_per_kv);
  for (int done = 0; done < range.num_tokens; done += tile_tokens) {
    WorkItem item = range;
    item.first_token += done;
    item.num_tokens = std::min(tile_tokens, range.num_tokens - done);
    item.first_position += done;
    if (item.is_causal) {
      item.begin = std::max<int64_t>(range.begin, int64_t(item.first_position) - args.window + 1);
      item.end = std::min(range.end, item.first_position + item.num_tokens);
    }
    // KV heads of a block are neighbours in memory: together if they are few rows and other threads have work too.
    const bool many_seqs = args.num_seqs >= 4 * args.num_threads;
    const int num_heads = many_seqs ? std::max(1, MIN_ITEM_ROWS / (item.num_tokens * queries_per_kv)) : 1;
    for (item.kv_head = 0; item.kv_head < args.cache.num_kv_heads; item.kv_head += num_heads) {
      item.num_kv_heads = std::min(num_heads, args.cache.num_kv_heads - item.kv_head);
      items.push_back(item);
    }
  }
}

//! The shared prefixes, as far as they fill whole chunks. Each query token sees the whole prefix.
std::vector<WorkItem> prefix_work_items(const AttentionArgs& args) {
  std::vector<WorkItem> items;
  for (int i = 0; i < args.num_prefixes; ++i) {
    const int first = args.prefix_start_loc[i], end = args.prefix_lens[i] / CHUNK * CHUNK;
    if (end == 0) continue;
    add_work_items(args, {args.prefix_tables + i * args.prefix_table_width, first, args.prefix_start_loc[i + 1] - first,
                          0, 0, end, false, false, true}, items);
  }
  return items;
}

//! Each sequence's keys after its shared prefix, or all.
std::vector<WorkItem> sequence_work_items(const AttentionArgs& args) {
  std::vector<WorkItem> items;
  for (int i = 0; i < args.num_seqs; ++i) {
    const int first = args.query_start_loc[i], num_tokens = args.query_start_loc[i + 1] - first;
    const int prefix = args.num_prefixes ? args.seq_prefix_lens[i] / CHUNK * CHUNK : 0, seq_len = args.seq_lens[i];
    add_work_items(args, {args.block_tables + i * args.table_width, first, num_tokens, seq_len - num_tokens, prefix,
                          seq_len, bool(args.is_causal), prefix > 0, false}, items);
  }
  return items;
}

template <class T>
void attend(const AttentionArgs& args, const PositionBias& bias, std::vector<WorkItem> items, float* states) {
  // Longest first, so that the threads end together. Stable, so that the KV heads of a tile stay neighbours.
  std::stable_sort(items.begin(), items.end(), [](const WorkItem& one, const WorkItem& other) {
    return int64_t(one.end - one.begin) * one.num_tokens > int64_t(other.end - other.begin) * other.num_tokens;
  });
  const int count = items.size();
  std::atomic<int> taken{0};
#pragma omp parallel num_threads(args.num_threads) if (count > 1)
  {
    AttentionTile<T> tile(args, bias);
    // A thread takes its next item before it computes the current one, to prefetch what it needs.
    for (int i = taken++, next; i < count; i = next) {
      next = taken++;
      tile.attend(items[i], next < count ? &items[next] : nullptr, states);
    }
  }
}

template <class T>
void attend(const AttentionArgs& args) {
  const PositionBias bias(args);
  std::unique_ptr<float[]> states;
  if (args.num_prefixes) states.reset(new float[int64_t(args.num_tokens) * args.num_heads * state_size<T>(args)]);
  attend<T>(args, bias, prefix_work_items(args), states.get());
  attend<T>(args, bias, sequence_work_items(args), states.get());
}

}  // namespace
}  // namespace pagedbatch

using namespace pagedbatch;

PAGEDBATCH_EXPORT_SIZE(AttentionArgs)

extern "C" void pagedbatch_attention(const AttentionArgs* args) {
  dispatch_dtype(args->is_bfloat16, [=](auto t) { attend<decltype(t)>(*args); });
}
