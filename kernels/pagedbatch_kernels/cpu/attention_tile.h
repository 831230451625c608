// FlashAttention for one work item: a pass over its keys in chunks of CHUNK tokens, with an online softmax (Milakov and
// Gimelshein, 2018; Dao et al., FlashAttention, 2022). Used by one thread.
//
// A row is one query head of one token. Scores are scaled by log2(e), so that probabilities are powers of 2. In
// bfloat16 probabilities are rounded before they meet the values, and row_sum adds the rounded ones: a query that
// attends to one token gets exactly its value.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kv_chunk.h"
#include "position_bias.h"

namespace pagedbatch {

//! How far a score may rise above row_max before row_max moves there and the accumulators are rescaled (FlashAttention
//! 4). Unnormalised probabilities stay below 2^12, and most chunks need no rescaling.
constexpr float RESCALE_THRESHOLD = 12;

//! Floats of a row's stored state: accumulator, row_sum (per lane), row_max.
template <class T>
int64_t state_size(const AttentionArgs& args) {
  return round_up(args.cache.head_size, LANES) + LANES + 1;
}

template <class T>
class AttentionTile {
 public:
  AttentionTile(const AttentionArgs& args, const PositionBias& bias)
      : args_(args),
        bias_(bias),
        queries_per_kv_(args.num_heads / args.cache.num_kv_heads),
        chunk_(args),
        query_stride_(round_up(args.cache.head_size, PAIR<T> * LANES) / PAIR<T>),
        width_(round_up(args.cache.head_size, LANES)),
        sign_flip_(args.scale < 0 ? SIGN_BITS<T> : 0),
        score_scale_(bias ? 1.0f : std::abs(args.scale)),
        log2_scale_((args.softcap > 0 ? args.softcap : score_scale_) * LOG2_E) {}

  //! Computes `item`, and prefetches the start of `next` (or null). `states`: [num_tokens, num_heads, state_size].
  void attend(const WorkItem& item, const WorkItem* next, float* states) {
    item_ = item;
    rows_per_head_ = item.num_tokens * queries_per_kv_;
    num_rows_ = rows_per_head_ * item.num_kv_heads;
    reserve();
    for_each_row([&](int row, int token, int head) { init_row(row, token, head, states); });
    attend_keys(next);
    for_each_row([&](int row, int token, int head) { finish_row(row, token, head, states); });
  }

 private:
  //! Calls body(row, token of the item, query head). Rows are ordered by KV head, then token, then query head.
  template <class Body>
  void for_each_row(Body body) {
    int row = 0;
    for (int head = item_.kv_head; head < item_.kv_head + item_.num_kv_heads; ++head) {
      for (int token = 0; token < item_.num_tokens; ++token) {
        for (int i = 0; i < queries_per_kv_; ++i) body(row++, token, head * queries_per_kv_ + i);
      }
    }
  }

  uint32_t* query(int row) { return (uint32_t*)query_.data() + row * query_stride_; }
  float* acc(int row) { return (float*)acc_.data() + row * (width_ + LANES); }
  float* row_sum(int row) { return acc(row) + width_; }
  float* state(int token, int head, float* states) const {
    return states + (int64_t(item_.first_token + token) * args_.num_heads + head) * state_size<T>(args_);
  }

  void reserve() {
    grow(query_, num_rows_ * (query_stride_ / LANES));
    grow(acc_, num_rows_ * (width_ / LANES + 1));
    grow(row_max_, num_rows_);
    grow(visible_end_, num_rows_);
    grow(position_, num_rows_);
    grow(head_, num_rows_);
  }

  //! Never shrinks: growing again would clear the new part.
  template <class Values>
  static void grow(Values& values, size_t size) {
    if (values.size() < size) values.resize(size);
  }

  void init_row(int row, int token, int head, float* states) {
    head_[row] = head;
    position_[row] = item_.first_position + token;
    visible_end_[row] = item_.is_causal ? position_[row] + 1 : item_.end;
    const T* from =
        (const T*)args_.query + (item_.first_token + token) * args_.token_stride + head * args_.head_stride;
    for (int d = 0; d < args_.cache.head_size; d += LANES * PAIR<T>) {
      store(query(row) + d / PAIR<T>, load_packed(from + d, args_.cache.head_size - d) ^ sign_flip_);
    }
    if (item_.loads_state) {
      const float* stored = state(token, head, states);
      std::memcpy(acc(row), stored, (width_ + LANES) * sizeof(float));
      row_max_[row] = stored[width_ + LANES];
    } else {
      // A sink is a first key whose value is zero.
      std::memset(acc(row), 0, (width_ + LANES) * sizeof(float));
      *row_sum(row) = args_.sinks ? 1.0f : 0.0f;
      row_max_[row] = args_.sinks ? args_.sinks[head] * LOG2_E : -INF;
    }
  }

  void finish_row(int row, int token, int head, float* states) {
    if (item_.stores_state) {
      float* stored = state(token, head, states);
      std::memcpy(stored, acc(row), (width_ + LANES) * sizeof(float));
      stored[width_ + LANES] = row_max_[row];
      return;
    }
    T* to = (T*)args_.output + (int64_t(item_.first_token + token) * args_.num_heads + head) * args_.cache.head_size;
    const float total = reduce_sum(load(row_sum(row)));
    for (int d = 0; d < args_.cache.head_size; d += LANES * PAIR<T>) {
      Vec values[PAIR<T>];
      for (int part = 0; part < PAIR<T>; ++part) values[part] = load(acc(row) + d + part * LANES) / total;
      store_packed(to + d, to_packed(values), args_.cache.head_size - d);
    }
  }

  void attend_keys(const WorkItem* next_item) {
    // Chunks begin at multiples of CHUNK, wherever the item begins: see attention.cpp.
    TokenLocations now = locate_tokens(args_, item_, item_.begin / CHUNK * CHUNK), next;
    for (bool last = false; !last; now = next) {
      int next_head = item_.kv_head;
      last = now.chunk + CHUNK >= item_.end;
      if (!last) {
        next = locate_tokens(args_, item_, now.chunk + CHUNK);
      } else if (next_item) {
        next = locate_tokens(args_, *next_item, next_item->begin / CHUNK * CHUNK);
        next_head = next_item->kv_head;
      } else {
        next = TokenLocations();
      }
      for (int i = 0; i < item_.num_kv_heads; ++i) {
        const int head = item_.kv_head + i, begin = i * rows_per_head_, end = begin + rows_per_head_;
        const bool more = i + 1 < item_.num_kv_heads;
        chunk_.load(now, head, more ? now : next, more ? head + 1 : next_head);
        for (int row = begin; row < end; row += TILE_ROWS) {
          chunk_.prefetch_share((row - begin) / TILE_ROWS, (rows_per_head_ + TILE_ROWS - 1) / TILE_ROWS);
          dispatch_const<TILE_ROWS>(std::min(TILE_ROWS, end - row), [&](auto rows) { attend_rows<rows>(row, now); });
        }
      }
    }
  }

  //! N rows by the chunk: scores, softmax, weighted values. Skips registers of keys that no row attends to.
  template <int N>
  void attend_rows(int row, const TokenLocations& tokens) {
    const int first = first_visible(row, tokens), last = last_visible(row + N - 1, tokens);
    if (first >= last) return;
    score<N>(row, first / LANES * LANES, round_up(last, LANES));
    if (bias_) {
      for (int n = 0; n < N; ++n) add_bias(row + n, n, first / LANES * LANES, last, tokens);
    }
    const bool all_visible = first_visible(row + N - 1, tokens) == 0 && last_visible(row, tokens) == CHUNK;
    if (!(all_visible && softmax_unmasked<N>(row))) {
      constexpr int PER_REGISTER = LANES * PAIR<T>;
      const int begin = first / PER_REGISTER * PER_REGISTER, end = round_up(last, PER_REGISTER);
      // Two loops, so that the latencies of the rows overlap.
      for (int n = 0; n < N; ++n) mask_scores(row + n, n, begin, end, tokens);
      for (int n = 0; n < N; ++n) softmax(row + n, n, begin, end);
    }
    add_weighted_values<N>(row, first, last);
  }

  //! Keys [first_visible, last_visible) of the chunk are visible to a row. Neither falls with the row.
  int first_visible(int row, const TokenLocations& tokens) const {
    return std::max<int64_t>(tokens.first, int64_t(visible_end_[row]) - args_.window - tokens.chunk);
  }
  int last_visible(int row, const TokenLocations& tokens) const {
    return std::min(tokens.last, visible_end_[row] - tokens.chunk);
  }

  template <int N>
  void score(int row, int begin, int end) {
    for (int i = begin; i < end; i += TILE_VECS * LANES) {
      dispatch_const<TILE_VECS>(std::min(TILE_VECS, (end - i) / LANES), [&](auto m) { score<N, m>(row, i); });
    }
  }

  //! Q * K^T of N rows and M registers of keys, from the chunk's key `i` on.
  template <int N, int M>
  void score(int row, int i) {
    const uint32_t* keys[M];
    for (int m = 0; m < M; ++m) keys[m] = chunk_.keys(i + m * LANES);
    const uint32_t* queries = query(row);
    const int64_t key_stride = chunk_.key_stride();
    const int query_stride = query_stride_, packed_head_size = chunk_.packed_head_size();
    const int pass = i / (TILE_VECS * LANES);
    Vec dots[N][M] = {};
    int k = 0;
    do {  // not `for`: that might not run at all, and GCC would then keep the sums in memory
      chunk_.prefetch_keys(k, pass);
      VecU32 key[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) key[m] = load(keys[m] + k * key_stride);
      fma_tile<T>(dots, key, [&](int n) { return queries[n * query_stride + k]; });
    } while (++k < packed_head_size);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) store(scores_[n] + i + m * LANES, dots[n][m]);
    }
  }

  //! Scales the scores of the n-th row of the tile, and adds the bias. Not inlined, for the sake of calls without one.
  __attribute__((noinline)) void add_bias(int row, int n, int begin, int end, const TokenLocations& tokens) {
    const float* const bias = bias_.chunk(head_[row], tokens.chunk - position_[row]);
    const Vec scale = broadcast(std::abs(args_.scale));
    for (int i = begin; i < end; i += LANES) {
      store(scores_[n] + i, fmadd(load(bias + i), load(scores_[n] + i), scale));
    }
  }

  //! The softmax of N rows to which the whole chunk is visible. False, having done nothing, if scores must be capped or
  //! some row rescaled.
  template <int N>
  bool softmax_unmasked(int row) {
    if (args_.softcap > 0) return false;
    bool no_rescale = true;
    for (int n = 0; n < N; ++n) {
      Vec max_score = load(scores_[n]);
#pragma GCC unroll 16
      for (int i = LANES; i < CHUNK; i += LANES) max_score = max(load(scores_[n] + i), max_score);
      no_rescale &= !any_gt(max_score * log2_scale_, row_max_[row + n] + RESCALE_THRESHOLD);
    }
    if (no_rescale) {
      for (int n = 0; n < N; ++n) softmax(row + n, n, 0, CHUNK);
    }
    return no_rescale;
  }

  //! Caps the scores of the n-th row of the tile, sets those of invisible keys to -inf, and rescales the row if needed.
  void mask_scores(int row, int n, int begin, int end, const TokenLocations& tokens) {
    const int first = first_visible(row, tokens), last = last_visible(row, tokens);
    Vec max_score = broadcast(-INF);
    for (int i = begin; i < end; i += LANES) {
      Vec values = load(scores_[n] + i);
      if (args_.softcap > 0 || i < first || i + LANES > last) {
        const VecI32 position = lane_indices() + i;
        if (args_.softcap > 0) values = tanh(values * (score_scale_ / args_.softcap));
        values = (position >= first) & (position < last) ? values : broadcast(-INF);
        store(scores_[n] + i, values);
      }
      max_score = max(max_score, values);
    }
    max_score = max_score * log2_scale_;
    if (any_gt(max_score, row_max_[row] + RESCALE_THRESHOLD)) rescale(row, reduce_max(max_score));
  }

  //! Turns the scores of the n-th row of the tile into unnormalised probabilities, and adds them to row_sum.
  __attribute__((always_inline)) void softmax(int row, int n, int begin, int end) {
    // row_max is -inf while all keys were outside the row's window, and -inf - -inf would be NaN.
    const Vec subtract = broadcast(row_max_[row] == -INF ? 0.0f : -row_max_[row]);
    const Vec factor = broadcast(log2_scale_);
    float* const sum = row_sum(row);
    const float* const scores = scores_[n];
    uint32_t* const to = probs_[n];
    Vec total = load(sum);
#pragma GCC unroll 4
    for (int i = begin; i < end; i += LANES * PAIR<T>) {
      Vec probs[PAIR<T>];
#pragma GCC unroll 2
      for (int part = 0; part < PAIR<T>; ++part) {
        probs[part] = exp2<T>(fmadd(subtract, load(scores + i + part * LANES), factor));
      }
      const VecU32 packed = to_packed(probs);
      store(to + i / PAIR<T>, packed);
      total = fmadd<T>(total, packed, broadcast(PACKED_ONE<T>));
    }
    store(sum, total);
  }

  void rescale(int row, float row_max) {
    const Vec factor = exp2(broadcast(row_max_[row] - row_max));
    for (int d = 0; d <= width_; d += LANES) store(acc(row) + d, load(acc(row) + d) * factor);
    row_max_[row] = row_max;
  }

  template <int N>
  void add_weighted_values(int row, int begin, int end) {
    for (int d = 0; d < width_; d += TILE_VECS * LANES) {
      const int panel = std::min(TILE_VECS, (width_ - d) / LANES);
      dispatch_const<TILE_VECS>(panel, [&](auto m) { add_weighted_values<N, m>(row, d, begin, end); });
    }
  }

  //! acc += P * V of N rows and M registers of elements, from element `d` on.
  template <int N, int M>
  void add_weighted_values(int row, int d, int begin, int end) {
    // Sizes are kept in locals, because the compiler must assume that a store changes the members.
    float* const to = acc(row) + d;
    const int stride = width_ + LANES;
    const int first = begin / PAIR<T>, last = round_up(end, PAIR<T>) / PAIR<T>;
    const int panel = d / (TILE_VECS * LANES), pass = panel % NUM_PASSES;
    const int line = panel / NUM_PASSES * (CHUNK / PAIR<T>);
    Vec sums[N][M];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[n][m] = load(to + n * stride + m * LANES);
    }
    int i = first;
    do {
      const uint32_t* from = chunk_.values(i * PAIR<T>) + d;
      chunk_.prefetch_values(line + i, pass);
      VecU32 value[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) value[m] = load(from + m * LANES);
      const uint32_t* const probs = probs_[0] + i;
      fma_tile<T>(sums, value, [probs](int n) { return probs[n * (CHUNK / PAIR<T>)]; });
    } while (++i < last);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) store(to + n * stride + m * LANES, sums[n][m]);
    }
  }

  const AttentionArgs& args_;
  const PositionBias& bias_;
  const int queries_per_kv_;
  KvChunk<T> chunk_;
  const int query_stride_;    //!< packed elements per row, rounded up to whole registers
  const int width_;           //!< head_size, rounded up to whole registers
  const uint32_t sign_flip_;  //!< xor-ed into queries, so that the scale can be taken as positive
  const float score_scale_;   //!< of the scores before they are capped: 1 if `add_bias` has scaled them
  const float log2_scale_;    //!< probability = 2^(score * log2_scale - row_max)
  WorkItem item_;
  int rows_per_head_, num_rows_;
  std::vector<VecU32> query_;   //!< [num_rows][query_stride]
  std::vector<Vec> acc_;        //!< [num_rows][width + LANES]: weighted values, then row_sum
  std::vector<float> row_max_;  //!< [num_rows], scaled
  // [num_rows]: where the keys end that are visible to the row, its position in the sequence, its query head.
  std::vector<int> visible_end_, position_, head_;
  // Of the rows that are computed now.
  alignas(sizeof(Vec)) float scores_[TILE_ROWS][CHUNK];
  alignas(sizeof(Vec)) uint32_t probs_[TILE_ROWS][CHUNK / PAIR<T>];
};

}  // namespace pagedbatch
