// Joint top-k of log-probabilities: over one position's vocabulary, or over all beams of a group together.
//
//   scores, indices [num_groups, k] = topk(logits - logsumexp + cum_logprobs) of each group_size neighbouring positions
//
// As in topk.py: the k largest entries lie in the k spans with the largest maxima, so only entries that reach the k-th
// largest maximum are sorted. Ties go to the lower index. A group's result does not depend on the rest of the batch.

#include <algorithm>
#include <vector>

#include "export.h"
#include "token_probs.h"

namespace pagedbatch {

struct JointTopkArgs {
  const void* logits;         // [num_groups * group_size, vocab_size] of float or bfloat16, `stride` elements apart
  const float* logsumexp;     // [num_groups * group_size], of each position
  const float* cum_logprobs;  // [num_groups * group_size], of each position's beam so far
  float* scores;              // [num_groups, k], best first
  int64_t* indices;           // [num_groups, k], position in the group * vocab_size + token id
  int64_t num_groups, group_size, vocab_size, stride;
  int64_t k;  // 1 <= k <= group_size * vocab_size < 2^32
  int32_t is_bfloat16;
  int32_t num_threads;
};

namespace {

constexpr int64_t MIN_SPAN = 64;
//! Spans per result: with this many, few entries beyond the k results reach the threshold.
constexpr int64_t SPANS_PER_RESULT = 32;

//! Keeps the k best of the pushed entries, as keys that sort by falling score, then rising index.
class TopkBuffer {
 public:
  explicit TopkBuffer(int64_t k) : k_(k) { keys_.reserve(capacity()); }

  void push(float score, uint32_t index) {
    const uint64_t key = uint64_t(~to_ordered_bits(score)) << 32 | index;
    if (key >= worst_) return;
    keys_.push_back(key);
    if (keys_.size() == capacity()) {
      std::nth_element(keys_.begin(), keys_.begin() + k_ - 1, keys_.end());
      keys_.resize(k_);
      worst_ = keys_.back();
    }
  }

  //! Writes them best first; if fewer than k were pushed, the rest is -inf at index 0.
  void write_sorted(float* scores, int64_t* indices) {
    std::sort(keys_.begin(), keys_.end());
    for (int64_t i = 0; i < k_; ++i) {
      const bool exists = i < int64_t(keys_.size());
      scores[i] = exists ? from_ordered_bits(~uint32_t(keys_[i] >> 32)) : -INF;
      indices[i] = exists ? uint32_t(keys_[i]) : 0;
    }
  }

 private:
  static constexpr uint32_t SIGN = 0x80000000;

  size_t capacity() const { return 2 * k_ + 64; }

  //! Bits that sort as unsigned integers like the values themselves. -0 becomes 0.
  static uint32_t to_ordered_bits(float value) {
    const uint32_t bits = bits_of(value + 0.0f);
    return bits & SIGN ? ~bits : bits | SIGN;
  }

  static float from_ordered_bits(uint32_t bits) { return float_of(bits & SIGN ? bits & ~SIGN : ~bits); }

  const int64_t k_;
  uint64_t worst_ = std::numeric_limits<uint64_t>::max();
  std::vector<uint64_t> keys_;
};

template <class T>
struct JointTopk {
  const JointTopkArgs& args;
  const int64_t span_size, num_spans;  //!< tokens per span, spans per position
  std::vector<float> maxima;           //!< [num_groups * group_size, num_spans] scores; -inf for NaN

  explicit JointTopk(const JointTopkArgs& args)
      : args(args), span_size(choose_span(args)), num_spans((args.vocab_size + span_size - 1) / span_size),
        maxima(args.num_groups * args.group_size * num_spans) {}

  static int64_t choose_span(const JointTopkArgs& args) {
    int64_t span = MIN_SPAN;
    while (args.group_size * (args.vocab_size / (2 * span)) >= SPANS_PER_RESULT * args.k) span *= 2;
    return span;
  }

  const T* logits(int64_t position) const { return (const T*)args.logits + position * args.stride; }

  float score(int64_t position, float logit) const {
    return (logit - args.logsumexp[position]) + args.cum_logprobs[position];
  }

  void find_maxima(int64_t position) {
    for (int64_t i = 0; i < num_spans; ++i) {
      const int64_t size = std::min(span_size, args.vocab_size - i * span_size);
      const float max_score = score(position, max_of(logits(position) + i * span_size, size));
      maxima[position * num_spans + i] = max_score == max_score ? max_score : -INF;
    }
  }

  void select(int64_t group) {
    const int64_t first = group * args.group_size, group_spans = args.group_size * num_spans;
    const float* group_maxima = &maxima[first * num_spans];
    float threshold = -INF;
    if (args.k <= group_spans) {
      std::vector<float> order(group_maxima, group_maxima + group_spans);
      std::nth_element(order.begin(), order.begin() + args.k - 1, order.end(), std::greater<float>());
      threshold = order[args.k - 1];
    }
    TopkBuffer best(args.k);
    for (int64_t i = 0; i < group_spans; ++i) {
      if (group_maxima[i] < threshold) continue;
      const int64_t position = i / num_spans, begin = i % num_spans * span_size;
      const int64_t end = std::min(args.vocab_size, begin + span_size);
      for (int64_t token = begin; token < end; ++token) {
        const float value = score(first + position, to_float(logits(first + position)[token]));
        if (value >= threshold) best.push(value, position * args.vocab_size + token);
      }
    }
    best.write_sorted(args.scores + group * args.k, args.indices + group * args.k);
  }
};

template <class T>
void joint_topk(const JointTopkArgs& args) {
  JointTopk<T> topk(args);
  const int64_t num_positions = args.num_groups * args.group_size;
#pragma omp parallel num_threads(args.num_threads) if (num_positions > 1)
  {
#pragma omp for schedule(static)
    for (int64_t position = 0; position < num_positions; ++position) topk.find_maxima(position);
#pragma omp for schedule(dynamic, 1)
    for (int64_t group = 0; group < args.num_groups; ++group) topk.select(group);
  }
}

}  // namespace
}  // namespace pagedbatch

using namespace pagedbatch;

PAGEDBATCH_EXPORT_SIZE(JointTopkArgs)

extern "C" void pagedbatch_joint_topk(const JointTopkArgs* args) {
  dispatch_dtype(args->is_bfloat16, [=](auto t) { joint_topk<decltype(t)>(*args); });
}
