// Attention of one tile of query rows: a pass over its keys, a chunk of tokens at a time, with the softmax kept running
// (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022). Knows one thread.
//
// Scores are multiplied by log2 e with their scale, so that weights are powers of 2.
//
// In bfloat16 the weights are rounded before they meet the values; their sum is that of the rounded ones, so that a row
// which sees one token gets its value, exactly.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kv_chunk.h"

namespace pagedbatch {

//! How far above a row's reference a score may rise before the reference moves there and all sums are rescaled (as in
//! FlashAttention 4): weights stay below 2^12, and most chunks need no rescaling.
constexpr float SLACK = 12;

//! Floats that a query row's state takes between two pieces: sums over values, of weights a lane each, the reference.
template <class T>
int64_t state_size(const Step& step) {
  return round_up(step.cache.head_size, LANES) + LANES + 1;
}

template <class T>
class Tile {
 public:
  explicit Tile(const Step& step)
      : step_(step),
        queries_per_kv_(step.num_heads / step.cache.num_kv_heads),
        chunk_(step),
        query_words_(round_up(step.cache.head_size, PER_WORD<T> * LANES) / PER_WORD<T>),
        width_(round_up(step.cache.head_size, LANES)),
        flipped_(step.scale < 0 ? SIGNS<T> : 0),
        factor_((step.softcap > 0 ? step.softcap : std::abs(step.scale)) * LOG2_E) {}

  //! Computes `piece`, and fetches what `next` (or null) begins with; `states` holds one state a query token and head.
  void attend(const Piece& piece, const Piece* next, float* states) {
    piece_ = piece;
    rows_per_head_ = piece.num_tokens * queries_per_kv_;
    num_rows_ = rows_per_head_ * piece.num_kv_heads;
    make_room();
    each_row([&](int row, int token, int head) { begin_row(row, token, head, states); });
    attend_keys(next);
    each_row([&](int row, int token, int head) { end_row(row, token, head, states); });
  }

 private:
  //! Rows lie by KV head, then token of the piece, then query head; `body` gets all three, the head among all.
  template <class Body>
  void each_row(Body body) {
    int row = 0;
    for (int head = piece_.kv_head; head < piece_.kv_head + piece_.num_kv_heads; ++head) {
      for (int token = 0; token < piece_.num_tokens; ++token) {
        for (int i = 0; i < queries_per_kv_; ++i) body(row++, token, head * queries_per_kv_ + i);
      }
    }
  }

  uint32_t* query(int row) { return (uint32_t*)query_.data() + row * query_words_; }
  float* sums(int row) { return (float*)sums_.data() + row * (width_ + LANES); }
  float* total(int row) { return sums(row) + width_; }
  float* state(int token, int head, float* states) const {
    return states + (int64_t(piece_.first_token + token) * step_.num_heads + head) * state_size<T>(step_);
  }

  void make_room() {
    grow(query_, num_rows_ * (query_words_ / LANES));
    grow(sums_, num_rows_ * (width_ / LANES + 1));
    grow(reference_, num_rows_);
    grow(position_, num_rows_);
  }

  //! Never smaller: to grow again would clear what is there.
  template <class Values>
  static void grow(Values& values, size_t size) {
    if (values.size() < size) values.resize(size);
  }

  void begin_row(int row, int token, int head, float* states) {
    position_[row] = piece_.first_position + token;
    const T* from =
        (const T*)step_.query + (piece_.first_token + token) * step_.token_stride + head * step_.head_stride;
    for (int d = 0; d < step_.cache.head_size; d += LANES * PER_WORD<T>) {
      store(query(row) + d / PER_WORD<T>, load_words(from + d, step_.cache.head_size - d) ^ flipped_);
    }
    if (piece_.resumes) {
      const float* left = state(token, head, states);
      std::memcpy(sums(row), left, (width_ + LANES) * sizeof(float));
      reference_[row] = left[width_ + LANES];
    } else {
      // A sink is a key seen first, whose value is zero.
      std::memset(sums(row), 0, (width_ + LANES) * sizeof(float));
      *total(row) = step_.sinks ? 1.0f : 0.0f;
      reference_[row] = step_.sinks ? step_.sinks[head] * LOG2_E : -INFINITE;
    }
  }

  void end_row(int row, int token, int head, float* states) {
    if (piece_.stays) {
      float* left = state(token, head, states);
      std::memcpy(left, sums(row), (width_ + LANES) * sizeof(float));
      left[width_ + LANES] = reference_[row];
      return;
    }
    T* to = (T*)step_.output + (int64_t(piece_.first_token + token) * step_.num_heads + head) * step_.cache.head_size;
    const float all = sum(load(total(row)));
    for (int d = 0; d < step_.cache.head_size; d += LANES * PER_WORD<T>) {
      Vec values[PER_WORD<T>];
      for (int part = 0; part < PER_WORD<T>; ++part) values[part] = load(sums(row) + d + part * LANES) / all;
      store_words(to + d, rounded(values), step_.cache.head_size - d);
    }
  }

  //! One KV head of one chunk after the other.
  void attend_keys(const Piece* next_piece) {
    // On the grid of chunks from token 0 on, wherever this piece begins: see attention.cpp.
    Tokens now = find_tokens(step_, piece_, piece_.begin / CHUNK * CHUNK), ahead;
    for (bool last = false; !last; now = ahead) {
      int head_ahead = piece_.kv_head;
      last = now.chunk + CHUNK >= piece_.end;
      if (!last) {
        ahead = find_tokens(step_, piece_, now.chunk + CHUNK);
      } else if (next_piece) {
        ahead = find_tokens(step_, *next_piece, next_piece->begin / CHUNK * CHUNK);
        head_ahead = next_piece->kv_head;
      } else {
        ahead = Tokens();
      }
      for (int i = 0; i < piece_.num_kv_heads; ++i) {
        const int head = piece_.kv_head + i, begin = i * rows_per_head_, end = begin + rows_per_head_;
        const bool more = i + 1 < piece_.num_kv_heads;
        chunk_.take(now, head, more ? now : ahead, more ? head + 1 : head_ahead);
        for (int row = begin; row < end; row += ROWS) {
          chunk_.fetch_share((row - begin) / ROWS, (rows_per_head_ + ROWS - 1) / ROWS);
          with_constant<ROWS>(std::min(ROWS, end - row), [&](auto rows) { attend_rows<rows>(row, now); });
        }
      }
    }
  }

  //! N rows and the packed chunk: their scores, weights and sums, of no more registers of tokens than one of them sees.
  template <int N>
  void attend_rows(int row, const Tokens& tokens) {
    const int first = first_seen(row, tokens), last = last_seen(row + N - 1, tokens);
    if (first >= last) return;
    score<N>(row, first / LANES * LANES, round_up(last, LANES));
    const bool sees_all = first_seen(row + N - 1, tokens) == 0 && last_seen(row, tokens) == CHUNK;
    if (!(sees_all && weigh_all<N>(row))) {
      constexpr int PER_REGISTER = LANES * PER_WORD<T>;
      const int begin = first / PER_REGISTER * PER_REGISTER, end = round_up(last, PER_REGISTER);
      // In two rounds, so that what the rows wait for overlaps.
      for (int n = 0; n < N; ++n) limit(row + n, n, begin, end, tokens);
      for (int n = 0; n < N; ++n) weigh(row + n, n, begin, end);
    }
    add_values<N>(row, first, last);
  }

  //! The chunk's tokens that a row sees: [first_seen, last_seen), both of which grow with the row.
  int first_seen(int row, const Tokens& tokens) const {
    return std::max<int64_t>(tokens.first, int64_t(position_[row]) - step_.window + 1 - tokens.chunk);
  }
  int last_seen(int row, const Tokens& tokens) const {
    return std::min(tokens.last, position_[row] + 1 - tokens.chunk);
  }

  template <int N>
  void score(int row, int begin, int end) {
    for (int i = begin; i < end; i += PANEL * LANES) {
      with_constant<PANEL>(std::min(PANEL, (end - i) / LANES), [&](auto panel) { score<N, panel>(row, i); });
    }
  }

  //! Products of N rows and M registers of keys, from key `i` of the chunk on.
  template <int N, int M>
  void score(int row, int i) {
    const uint32_t* keys[M];
    for (int m = 0; m < M; ++m) keys[m] = chunk_.keys(i + m * LANES);
    const uint32_t* queries = query(row);
    const int64_t key_stride = chunk_.key_stride();
    const int query_words = query_words_, num_words = chunk_.num_words(), round = i / (PANEL * LANES);
    Vec dots[N][M] = {};
    int word = 0;
    do {  // for all GCC knows, a `for` may not run, and it then keeps the sums in memory
      chunk_.fetch_keys(word, round);
      Words key[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) key[m] = load(keys[m] + word * key_stride);
      add_products<T>(dots, key, [&](int n) { return queries[n * query_words + word]; });
    } while (++word < num_words);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) store(scores_[n] + i + m * LANES, dots[n][m]);
    }
  }

  //! Weights of N rows that see the whole chunk, unless a reference must move or scores be capped: then false.
  template <int N>
  bool weigh_all(int row) {
    if (step_.softcap > 0) return false;
    bool all_stay = true;
    for (int n = 0; n < N; ++n) {
      Vec most = load(scores_[n]);
#pragma GCC unroll 16
      for (int i = LANES; i < CHUNK; i += LANES) most = larger(load(scores_[n] + i), most);
      all_stay &= !any_above(most * factor_, reference_[row + n] + SLACK);
    }
    if (all_stay) {
      for (int n = 0; n < N; ++n) weigh(row + n, n, 0, CHUNK);
    }
    return all_stay;
  }

  //! Caps the `n`-th row's scores, makes them -inf for tokens that it does not see, and moves its reference if it must.
  void limit(int row, int n, int begin, int end, const Tokens& tokens) {
    const int first = first_seen(row, tokens), last = last_seen(row, tokens);
    Vec most = broadcast(-INFINITE);
    for (int i = begin; i < end; i += LANES) {
      Vec values = load(scores_[n] + i);
      if (step_.softcap > 0 || i < first || i + LANES > last) {
        const Ints number = lane_numbers() + i;
        if (step_.softcap > 0) values = tanh(values * (std::abs(step_.scale) / step_.softcap));
        values = (number >= first) & (number < last) ? values : broadcast(-INFINITE);
        store(scores_[n] + i, values);
      }
      most = larger(most, values);
    }
    most = most * factor_;
    if (any_above(most, reference_[row] + SLACK)) rescale(row, largest(most));
  }

  //! Turns the `n`-th row's scores into weights, and adds these up.
  __attribute__((always_inline)) void weigh(int row, int n, int begin, int end) {
    // A row that has seen nothing yet, as all lies outside its window: -inf - -inf would be NaN.
    const Vec subtract = broadcast(reference_[row] == -INFINITE ? 0.0f : -reference_[row]);
    const Vec factor = broadcast(factor_);
    float* const sum = total(row);
    const float* const scores = scores_[n];
    uint32_t* const to = weights_[n];
    Vec all = load(sum);
#pragma GCC unroll 4
    for (int i = begin; i < end; i += LANES * PER_WORD<T>) {
      Vec weights[PER_WORD<T>];
#pragma GCC unroll 2
      for (int part = 0; part < PER_WORD<T>; ++part) {
        weights[part] = exp2<T>(multiply_add(subtract, load(scores + i + part * LANES), factor));
      }
      const Words words = rounded(weights);
      store(to + i / PER_WORD<T>, words);
      all = multiply_add<T>(all, words, broadcast(ONES<T>));
    }
    store(sum, all);
  }

  void rescale(int row, float reference) {
    const Vec factor = exp2(broadcast(reference_[row] - reference));
    for (int d = 0; d <= width_; d += LANES) store(sums(row) + d, load(sums(row) + d) * factor);
    reference_[row] = reference;
  }

  template <int N>
  void add_values(int row, int begin, int end) {
    for (int d = 0; d < width_; d += PANEL * LANES) {
      const int panel = std::min(PANEL, (width_ - d) / LANES);
      with_constant<PANEL>(panel, [&](auto m) { add_values<N, m>(row, d, begin, end); });
    }
  }

  //! Adds weighted values of N rows and M registers of elements, from element `d` on.
  template <int N, int M>
  void add_values(int row, int d, int begin, int end) {
    // Sizes are kept in locals: for all the compiler knows, a store might change them.
    float* const to = sums(row) + d;
    const int stride = width_ + LANES;
    const int first = begin / PER_WORD<T>, last = round_up(end, PER_WORD<T>) / PER_WORD<T>;
    const int pass = d / (PANEL * LANES), line = pass / ROUNDS * (CHUNK / PER_WORD<T>), round = pass % ROUNDS;
    Vec added[N][M];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) added[n][m] = load(to + n * stride + m * LANES);
    }
    int i = first;
    do {
      const uint32_t* from = chunk_.values(i * PER_WORD<T>) + d;
      chunk_.fetch_values(line + i, round);
      Words value[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) value[m] = load(from + m * LANES);
      const uint32_t* const weights = weights_[0] + i;
      add_products<T>(added, value, [weights](int n) { return weights[n * (CHUNK / PER_WORD<T>)]; });
    } while (++i < last);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) store(to + n * stride + m * LANES, added[n][m]);
    }
  }

  const Step& step_;
  const int queries_per_kv_;
  Chunk<T> chunk_;
  const int query_words_;   //!< of a row, to whole registers
  const int width_;         //!< floats of a row's sums over values
  const uint32_t flipped_;  //!< bits of a query's words, so that no scale is negative
  const float factor_;      //!< of a score, whose weight is 2 to the power of the product
  Piece piece_;
  int rows_per_head_, num_rows_;
  std::vector<Words> query_;      //!< [rows][words]
  std::vector<Vec> sums_;         //!< [rows][width + LANES], of weighted values and of weights
  std::vector<float> reference_;  //!< [rows], the score whose weight is 1
  std::vector<int> position_;     //!< [rows], in the sequence
  // Of the rows at hand.
  alignas(sizeof(Vec)) float scores_[ROWS][CHUNK];
  alignas(sizeof(Vec)) uint32_t weights_[ROWS][CHUNK / PER_WORD<T>];
};

}  // namespace pagedbatch
