// The largest sums of joint rows: the most likely tokens of a row, or the best continuations of all beams of a group.
//
// As in selection.py: the `count` largest lie in the spans with the `count` largest maxima, so that only entries no
// smaller than the least of those maxima are ranked. Of equals, the first come first, whatever is read beside them.

#include <algorithm>
#include <vector>

#include "token_probs.h"

namespace pagedbatch {

//! The arguments of `rank`, field by field those of `rows.Ranking` in Python.
struct Ranking {
  const void* scores;       // [num_groups * width, size], rows `stride` elements apart
  const float* normalisers; // [num_groups * width]; a sum is a score less its row's normaliser,
  const float* standing;    // [num_groups * width]; plus what its row stands at
  float* sums;              // [num_groups, count], best first
  int64_t* places;          // [num_groups, count], row in the group times `size` plus token id
  int64_t num_groups, width, size, stride, count;
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

constexpr int64_t LEAST_SPAN = 64;
//! So many spans for each entry that is wanted: then few more than those wanted are ranked.
constexpr int64_t SPANS_EACH = 32;

//! The best `count` of what is offered, in little more room. Keys rise as sums fall, and places rise in them.
class Best {
 public:
  explicit Best(int64_t count) : count_(count) { keys_.reserve(room()); }

  void offer(float sum, uint32_t place) {
    const uint64_t key = uint64_t(~ordered(sum)) << 32 | place;
    if (key >= worst_) return;
    keys_.push_back(key);
    if (keys_.size() == room()) {
      std::nth_element(keys_.begin(), keys_.begin() + count_ - 1, keys_.end());
      keys_.resize(count_);
      worst_ = keys_.back();
    }
  }

  //! Writes them best first; in the place of those that there are not, -inf at place 0.
  void list(float* sums, int64_t* places) {
    std::sort(keys_.begin(), keys_.end());
    for (int64_t i = 0; i < count_; ++i) {
      const bool is_there = i < int64_t(keys_.size());
      sums[i] = is_there ? number(~uint32_t(keys_[i] >> 32)) : -INFINITE;
      places[i] = is_there ? uint32_t(keys_[i]) : 0;
    }
  }

 private:
  static constexpr uint32_t SIGN = 0x80000000;

  size_t room() const { return 2 * count_ + 64; }

  //! Bits that rise with the number. -0 is 0.
  static uint32_t ordered(float value) {
    const uint32_t bits = bits_of(value + 0.0f);
    return bits & SIGN ? ~bits : bits | SIGN;
  }

  static float number(uint32_t ordered) { return float_of(ordered & SIGN ? ordered & ~SIGN : ~ordered); }

  const int64_t count_;
  uint64_t worst_ = std::numeric_limits<uint64_t>::max();
  std::vector<uint64_t> keys_;
};

template <class T>
struct Ranker {
  const Ranking& ranking;
  const int64_t span, spans;          //!< tokens in each, spans in a row
  std::vector<float> maxima;          //!< [num_groups * width, spans], of the sums; -inf where they are NaN

  explicit Ranker(const Ranking& from)
      : ranking(from), span(choose_span(from)), spans((from.size + span - 1) / span),
        maxima(from.num_groups * from.width * spans) {}

  static int64_t choose_span(const Ranking& ranking) {
    int64_t span = LEAST_SPAN;
    while (ranking.width * (ranking.size / (2 * span)) >= SPANS_EACH * ranking.count) span *= 2;
    return span;
  }

  const T* scores(int64_t row) const { return (const T*)ranking.scores + row * ranking.stride; }

  float sum(int64_t row, float score) const { return (score - ranking.normalisers[row]) + ranking.standing[row]; }

  void find_maxima(int64_t row) {
    for (int64_t i = 0; i < spans; ++i) {
      const float most = largest_of(scores(row) + i * span, std::min(span, ranking.size - i * span));
      const float most_sum = sum(row, most);
      maxima[row * spans + i] = most_sum == most_sum ? most_sum : -INFINITE;
    }
  }

  void rank(int64_t group) {
    const int64_t first_row = group * ranking.width, num_spans = ranking.width * spans;
    const float* own = &maxima[first_row * spans];
    float least = -INFINITE;
    if (ranking.count <= num_spans) {
      std::vector<float> order(own, own + num_spans);
      std::nth_element(order.begin(), order.begin() + ranking.count - 1, order.end(), std::greater<float>());
      least = order[ranking.count - 1];
    }
    Best best(ranking.count);
    for (int64_t i = 0; i < num_spans; ++i) {
      if (own[i] < least) continue;
      const int64_t row = i / spans, begin = i % spans * span, end = std::min(ranking.size, begin + span);
      for (int64_t token = begin; token < end; ++token) {
        const float value = sum(first_row + row, to_float(scores(first_row + row)[token]));
        if (value >= least) best.offer(value, row * ranking.size + token);
      }
    }
    best.list(ranking.sums + group * ranking.count, ranking.places + group * ranking.count);
  }
};

template <class T>
void rank(const Ranking& ranking) {
  Ranker<T> ranker(ranking);
  const int64_t num_rows = ranking.num_groups * ranking.width;
#pragma omp parallel num_threads(ranking.num_threads) if (num_rows > 1)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) ranker.find_maxima(row);
#pragma omp for schedule(dynamic, 1)
    for (int64_t group = 0; group < ranking.num_groups; ++group) ranker.rank(group);
  }
}

}  // namespace
}  // namespace pagedbatch

//! `count` is at least 1 and at most width * size, which is below 2^32.
extern "C" void pagedbatch_rank(const pagedbatch::Ranking* ranking) {
  if (ranking->is_bfloat16) {
    pagedbatch::rank<pagedbatch::BFloat16>(*ranking);
  } else {
    pagedbatch::rank<float>(*ranking);
  }
}
