// Attention of one tile of query rows: a pass over its keys, a chunk of tokens at a time, with the softmax kept running
// (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022). Knows one thread.
//
// A chunk's keys are transposed into floats first, so that a register holds one element of LANES keys: each score is
// then a sum in one lane, in order, and all query heads and tokens of the tile use what was read once.

#pragma once

#include <algorithm>
#include <vector>

#include "step.h"
#include "vec.h"

namespace pagedbatch {

//! Tokens taken at once. A multiple of every LANES; a larger one leaves more of a shared prefix to each row.
constexpr int CHUNK = 64;
//! Query rows whose accumulators stand in registers together.
constexpr int ROWS = 4;

constexpr int round_up(int size, int to) { return (size + to - 1) / to * to; }

//! Floats that a query row's state takes between two pieces: its sums over values, largest score and sum of weights.
inline int64_t state_size(const Step& step) { return step.head_size + 2; }

template <class T>
class Tile {
 public:
  explicit Tile(const Step& step)
      : step_(step),
        queries_per_kv_(step.num_heads / step.num_kv_heads),
        width_(round_up(step.head_size, 2 * LANES)),
        packed_keys_(CHUNK * width_ / LANES) {}

  //! Computes `piece`; `states` holds one state a query token and head.
  void attend(const Piece& piece, float* states) {
    piece_ = piece;
    rows_per_head_ = piece.num_tokens * queries_per_kv_;
    num_rows_ = rows_per_head_ * piece.num_kv_heads;
    make_room();
    load_queries();
    for (int row = 0; row < num_rows_; ++row) begin_row(row, states);
    attend_keys();
    for (int row = 0; row < num_rows_; ++row) end_row(row, states);
  }

 private:
  //! Where the tokens of a chunk stand.
  struct Tokens {
    int chunk;              //!< the first one's number, a multiple of CHUNK
    int first, last;        //!< of the CHUNK tokens, those that are read
    int64_t offset[CHUNK];  //!< of each one's first key in the layer's cache
  };

  // Rows lie by KV head, then token, then query head.
  int token(int row) const { return row % rows_per_head_ / queries_per_kv_; }
  int head(int row) const {
    return (piece_.kv_head + row / rows_per_head_) * queries_per_kv_ + row % queries_per_kv_;
  }
  float* query(int row) { return (float*)query_.data() + row * width_; }
  float* sums(int row) { return (float*)sums_.data() + row * width_; }
  float* scores(int row) { return (float*)scores_.data() + row * CHUNK; }
  float* packed_keys(int element) { return (float*)packed_keys_.data() + element * CHUNK; }
  float* state(int row, float* states) const {
    return states + (int64_t(piece_.first_token + token(row)) * step_.num_heads + head(row)) * state_size(step_);
  }

  void make_room() {
    if (int(largest_.size()) >= num_rows_) return;
    query_.resize(num_rows_ * width_ / LANES);
    sums_.resize(num_rows_ * width_ / LANES);
    scores_.resize(num_rows_ * CHUNK / LANES);
    largest_.resize(num_rows_);
    total_.resize(num_rows_);
    factor_.resize(num_rows_);
  }

  void load_queries() {
    for (int row = 0; row < num_rows_; ++row) {
      const T* from = (const T*)step_.query + (piece_.first_token + token(row)) * step_.token_stride +
                      head(row) * step_.head_stride;
      for (int d = 0; d < step_.head_size; d += LANES) {
        store(query(row) + d, load(from + d, step_.head_size - d) * step_.scale);
      }
    }
  }

  void begin_row(int row, float* states) {
    std::memset(sums(row), 0, width_ * sizeof(float));
    if (piece_.resumes) {
      const float* from = state(row, states);
      std::memcpy(sums(row), from, step_.head_size * sizeof(float));
      largest_[row] = from[step_.head_size];
      total_[row] = from[step_.head_size + 1];
    } else {
      // A sink is a key seen first, whose value is zero.
      largest_[row] = step_.sinks ? step_.sinks[head(row)] : -INFINITE;
      total_[row] = step_.sinks ? 1.0f : 0.0f;
    }
  }

  void end_row(int row, float* states) {
    if (piece_.stays) {
      float* to = state(row, states);
      std::memcpy(to, sums(row), step_.head_size * sizeof(float));
      to[step_.head_size] = largest_[row];
      to[step_.head_size + 1] = total_[row];
      return;
    }
    T* to = (T*)step_.output +
            (int64_t(piece_.first_token + token(row)) * step_.num_heads + head(row)) * step_.head_size;
    for (int d = 0; d < step_.head_size; d += LANES) {
      store(to + d, load(sums(row) + d) / total_[row], step_.head_size - d);
    }
  }

  //! One KV head of one chunk after the other; while one is computed, the next one comes from memory.
  void attend_keys() {
    // On the grid of chunks from token 0 on, wherever this piece begins: see attention.cpp.
    Tokens now = find_tokens(piece_.begin / CHUNK * CHUNK);
    prefetch(now, 0);
    while (now.chunk < piece_.end) {
      const Tokens next = find_tokens(now.chunk + CHUNK);
      for (int head = 0; head < piece_.num_kv_heads; ++head) {
        if (head + 1 < piece_.num_kv_heads) {
          prefetch(now, head + 1);
        } else {
          prefetch(next, 0);
        }
        attend_chunk(now, head);
      }
      now = next;
    }
  }

  Tokens find_tokens(int chunk) const {
    const int64_t token_stride = int64_t(step_.num_kv_heads) * step_.head_size;
    Tokens tokens;
    tokens.chunk = chunk;
    tokens.first = std::max(piece_.begin - chunk, 0);
    tokens.last = std::min(piece_.end - chunk, CHUNK);
    const int32_t* block = piece_.block_table + (chunk + tokens.first) / step_.block_size;
    int in_block = (chunk + tokens.first) % step_.block_size;
    for (int i = tokens.first; i < tokens.last; ++i) {
      tokens.offset[i] = (int64_t(*block) * step_.block_size + in_block) * token_stride;
      if (++in_block == step_.block_size) {
        in_block = 0;
        ++block;
      }
    }
    return tokens;
  }

  const T* keys(int head) const { return (const T*)step_.layer_cache + (piece_.kv_head + head) * step_.head_size; }
  const T* values(int head) const {
    return keys(head) + step_.num_blocks * step_.block_size * step_.num_kv_heads * step_.head_size;
  }

  //! Inlined by force: GCC takes a function that only prefetches for one without effect, and drops the calls.
  __attribute__((always_inline)) void prefetch(const Tokens& tokens, int head) const {
    constexpr int LINE = 64 / sizeof(T);
    const T *key = keys(head), *value = values(head);
    for (int i = tokens.first; i < tokens.last; ++i) {
      for (int d = 0; d < step_.head_size; d += LINE) {
        __builtin_prefetch(key + tokens.offset[i] + d, 0, 2);
        __builtin_prefetch(value + tokens.offset[i] + d, 0, 2);
      }
    }
  }

  void attend_chunk(const Tokens& tokens, int head) {
    const int begin = head * rows_per_head_, end = begin + rows_per_head_;
    pack_keys(tokens, keys(head));
    for (int row = begin; row < end; row += ROWS) {
      with_constant<ROWS>(std::min(ROWS, end - row), [&](auto rows) { score<rows>(row, tokens); });
    }
    for (int row = begin; row < end; ++row) weigh(row, tokens);
    for (int row = begin; row < end; row += ROWS) {
      with_constant<ROWS>(std::min(ROWS, end - row), [&](auto rows) { add_values<rows>(row, tokens, values(head)); });
    }
  }

  //! Transposes keys into `packed_keys(element)[token]`; zeros for tokens outside the piece, which may not be read.
  void pack_keys(const Tokens& tokens, const T* keys) {
    constexpr int PER_WORD = 4 / sizeof(T);
    constexpr int PER_REGISTER = LANES * PER_WORD;
    for (int group = tokens.first / LANES * LANES; group < tokens.last; group += LANES) {
      const bool all_tokens = group >= tokens.first && group + LANES <= tokens.last;
      for (int d = 0; d < step_.head_size; d += PER_REGISTER) {
        Words words[LANES];
        if (all_tokens && d + PER_REGISTER <= step_.head_size) {
#pragma GCC unroll 16
          for (int lane = 0; lane < LANES; ++lane) {
            std::memcpy(&words[lane], keys + tokens.offset[group + lane] + d, sizeof(Words));
          }
        } else {
          T padded[LANES][PER_REGISTER] = {};
          const int count = std::min(PER_REGISTER, step_.head_size - d);
          for (int i = std::max(group, tokens.first); i < std::min(group + LANES, tokens.last); ++i) {
            std::copy_n(keys + tokens.offset[i] + d, count, padded[i - group]);
          }
          std::memcpy(words, padded, sizeof words);
        }
        transpose(words);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; ++lane) {
          float* to = packed_keys(d + lane * PER_WORD) + group;
          if constexpr (PER_WORD == 1) {
            store(to, (Vec)words[lane]);
          } else {  // two bfloat16, the first in the lower half
            store(to, (Vec)(words[lane] << 16));
            store(to + CHUNK, (Vec)(words[lane] & 0xffff0000u));
          }
        }
      }
    }
  }

  template <int N>
  void score(int row, const Tokens& tokens) {
    const int end = round_up(tokens.last, LANES);
    for (int i = tokens.first / LANES * LANES; i < end; i += PANEL * LANES) {
      with_constant<PANEL>(std::min(PANEL, (end - i) / LANES), [&](auto panel) { score<N, panel>(row, i); });
    }
  }

  //! Scores of N rows and M registers of keys, from key `i` of the chunk on.
  template <int N, int M>
  void score(int row, int i) {
    Vec dots[N][M] = {};
    for (int d = 0; d < step_.head_size; ++d) {
      const float* key = packed_keys(d) + i;
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Vec element = broadcast(query(row + n)[d]);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) dots[n][m] += element * load(key + m * LANES);
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) store(scores(row + n) + i + m * LANES, dots[n][m]);
    }
  }

  //! Turns a row's scores into weights, relative to the largest score so far.
  void weigh(int row, const Tokens& tokens) {
    const int position = piece_.first_position + token(row);
    const int first = std::max<int64_t>(tokens.first, int64_t(position) - step_.window + 1 - tokens.chunk);
    const int last = std::min(tokens.last, position + 1 - tokens.chunk);
    const int begin = tokens.first / LANES * LANES, end = round_up(tokens.last, LANES);
    Vec most = broadcast(largest_[row]);
    for (int i = begin; i < end; i += LANES) {
      Vec values = load(scores(row) + i);
      if (step_.softcap > 0) values = tanh(values / step_.softcap) * step_.softcap;
      if (i < first || i + LANES > last) {
        const Ints number = lane_numbers() + i;
        values = (number >= first) & (number < last) ? values : broadcast(-INFINITE);
      }
      store(scores(row) + i, values);
      most = larger(most, values);
    }
    const float largest_now = largest(most);
    // A row that has seen nothing yet, as all lies outside its window: -inf - -inf would be NaN.
    const float subtract = largest_now == -INFINITE ? 0.0f : largest_now;
    Vec sum_now{};
    for (int i = begin; i < end; i += LANES) {
      const Vec weights = exp_negative(load(scores(row) + i) - subtract);
      store(scores(row) + i, weights);
      sum_now += weights;
    }
    factor_[row] = exp_negative(broadcast(largest_[row] - subtract))[0];
    total_[row] = total_[row] * factor_[row] + sum(sum_now);
    largest_[row] = largest_now;
  }

  template <int N>
  void add_values(int row, const Tokens& tokens, const T* values) {
    const int end = round_up(step_.head_size, LANES);
    for (int d = 0; d < end; d += PANEL * LANES) {
      const int panel = std::min(PANEL, (end - d) / LANES);
      if (d + panel * LANES <= step_.head_size) {
        with_constant<PANEL>(panel, [&](auto m) { add_values<N, m, true>(row, d, tokens, values); });
      } else {
        with_constant<PANEL>(panel, [&](auto m) { add_values<N, m, false>(row, d, tokens, values); });
      }
    }
  }

  //! Adds weighted values of N rows and M registers of elements, from element `d` on; WHOLE: the head fills them.
  template <int N, int M, bool WHOLE>
  void add_values(int row, int d, const Tokens& tokens, const T* values) {
    Vec added[N][M];
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) added[n][m] = load(sums(row + n) + d + m * LANES) * factor_[row + n];
    }
    for (int i = tokens.first; i < tokens.last; ++i) {
      Vec value[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const T* from = values + tokens.offset[i] + d + m * LANES;
        value[m] = WHOLE ? load(from) : load(from, step_.head_size - d - m * LANES);
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Vec weight = broadcast(scores(row + n)[i]);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) added[n][m] += weight * value[m];
      }
    }
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) store(sums(row + n) + d + m * LANES, added[n][m]);
    }
  }

  const Step& step_;
  const int queries_per_kv_;
  const int width_;  //!< floats a row: head_size, and room for what is stored a register at a time
  Piece piece_;
  int rows_per_head_, num_rows_;
  std::vector<Vec> packed_keys_;  //!< [width][CHUNK]
  std::vector<Vec> query_;        //!< [rows][width], scaled
  std::vector<Vec> sums_;         //!< [rows][width], of weighted values
  std::vector<Vec> scores_;       //!< [rows][CHUNK], then weights
  std::vector<float> largest_;    //!< [rows], score so far
  std::vector<float> total_;      //!< [rows], sum of weights
  std::vector<float> factor_;     //!< [rows], what the chunk makes of earlier weights
};

}  // namespace pagedbatch
