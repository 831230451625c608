// The token probabilities of one position: softmax with temperature, then top-k, top-p and min-p, then sampling by the
// inverse CDF.
//
// The vocabulary is never sorted. The threshold of top-k or top-p is bracketed by passes that sum everything above
// several cuts at once, until few tokens are left in the bracket, and only those are sorted.
//
// Probabilities are not normalised: the likeliest token's is 1.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vec.h"

namespace pagedbatch {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline bool any(VecI32 mask) {
  uint64_t parts[LANES / 2], found = 0;
  std::memcpy(parts, &mask, sizeof mask);
  for (uint64_t part : parts) found |= part;
  return found;
}

//! The largest of `size` values, NaN left out; -inf if there are none.
template <class T>
float max_of(const T* from, int64_t size) {
  constexpr int STEP = 4;
  Vec maxima[STEP];
  std::fill_n(maxima, STEP, broadcast(-INF));
  int64_t i = 0;
  for (; i + STEP * LANES <= size; i += STEP * LANES) {
    for (int j = 0; j < STEP; ++j) maxima[j] = max(load(from + i + j * LANES), maxima[j]);
  }
  float result = reduce_max(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])));
  for (; i < size; ++i) {
    const float value = to_float(from[i]);
    result = value > result ? value : result;
  }
  return result;
}

//! The last token to keep, in the order likeliest first and, among ties, lower id first.
struct Threshold {
  float prob;
  int32_t token_id;
};

constexpr int32_t ALL_TIES = std::numeric_limits<int32_t>::max();

class TokenProbs {
 public:
  explicit TokenProbs(int64_t size)
      : size_(size),
        padded_((size + SPAN - 1) / SPAN * SPAN),
        probs_(padded_),
        cdf_(padded_ / SPAN),
        candidates_(MAX_CANDIDATES + BLOCK) {}

  //! prob = e^((logit - max) / temperature), temperature > 0.
  template <class T>
  void softmax(const T* logits, float temperature) {
    const float top = max_of(logits, size_), slope = 1.0f / temperature;
    const int64_t whole = size_ / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
      store(&probs_[i], exp((load(logits + i) - top) * slope));
    }
    if (whole < size_) {
      const int count = size_ - whole;
      store(&probs_[whole], exp((load(logits + whole, count) - top) * slope), count);
    }
  }

  //! Keeps what is at least as likely as the k-th token.
  void top_k(int64_t k) { apply(Threshold{find_threshold<true>(k, kth_lower_bound(k)).prob, ALL_TIES}); }

  //! Keeps the likeliest tokens until they hold the share `p`.
  void top_p(double p) {
    const double total = build_cdf(), target = p * total;
    // All tokens below this together hold less than the share to drop: the threshold is not among them.
    const float min_prob = (total - target) / size_;
    apply(find_threshold<false>(target, std::max(min_prob, SMALLEST)));
  }

  //! Keeps what has at least `p` times the probability of the likeliest token.
  void min_p(float p) { apply(Threshold{p, ALL_TIES}); }

  void copy_to(float* output) const { std::copy_n(probs_.begin(), size_, output); }

  //! Cumulative sums at the end of each span, for `sample`. Returns the total.
  double build_cdf() {
    double total = 0;
    for (int64_t span = 0; span < padded_ / SPAN; ++span) {
      Vec sums{};
      for (int64_t i = span * SPAN; i < (span + 1) * SPAN; i += LANES) sums += load(&probs_[i]);
      cdf_[span] = total += reduce_sum(sums);
    }
    return total;
  }

  //! The first token at which the CDF exceeds uniform * total, 0 <= uniform < 1; 0 if all probabilities are 0.
  int64_t sample(double uniform) const {
    const double target = uniform * cdf_.back();
    // Strictly above the target, so that tokens of probability 0 are skipped.
    const int64_t span = std::upper_bound(cdf_.begin(), cdf_.end(), target) - cdf_.begin();
    if (span == int64_t(cdf_.size())) return 0;
    double end = span ? cdf_[span - 1] : 0.0;
    // The span's sum may have been rounded up slightly above the last `end`: then its last possible token is meant.
    int64_t drawn = 0;
    for (int64_t i = span * SPAN; i < (span + 1) * SPAN; ++i) {
      if (probs_[i] == 0.0f) continue;
      drawn = i;
      end += probs_[i];
      if (end > target) break;
    }
    return drawn;
  }

 private:
  //! Tokens summed in float before double takes over: rounding stays below 1e-6 of the total.
  static constexpr int SPAN = 256;
  static constexpr int CUTS = 3;
  //! Few enough to sort.
  static constexpr int64_t MAX_CANDIDATES = 256;
  static constexpr int BLOCK = 64;
  static constexpr float SMALLEST = std::numeric_limits<float>::min();

  //! Sets what comes after the threshold to 0.
  void apply(Threshold last) {
    VecI32 ids = lane_indices();
    for (int64_t i = 0; i < padded_; i += LANES, ids += LANES) {
      const Vec probs = load(&probs_[i]);
      const VecI32 kept = (probs > last.prob) | ((probs == last.prob) & (ids <= last.token_id));
      store(&probs_[i], kept ? probs : Vec{});
    }
  }

  //! A lower bound of the k-th largest: the k-th largest maximum of a span.
  float kth_lower_bound(int64_t k) const {
    const int64_t num_spans = padded_ / SPAN;
    if (k > num_spans) return SMALLEST;
    std::vector<float> maxima(num_spans);
    for (int64_t span = 0; span < num_spans; ++span) maxima[span] = max_of(&probs_[span * SPAN], SPAN);
    std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<float>());
    return std::max(maxima[k - 1], SMALLEST);
  }

  //! The last token before which there is less than `target`: tokens if BY_COUNT, else probability.
  //!
  //! It is not below `min_prob`. Positive floats sort like their bits.
  template <bool BY_COUNT>
  Threshold find_threshold(double target, float min_prob) {
    uint32_t low = bits_of(min_prob), high = bits_of(1.0f) + 1;  // the threshold is in [low, high)
    double above = 0;  // amount at float_of(high) or more
    const auto amount = [](float prob) { return BY_COUNT ? 1.0 : prob; };
    while (high - low > 1) {
      if (!collect_candidates(low, high)) {
        narrow_range<BY_COUNT>(target, low, high, above);
        continue;
      }
      std::sort(candidates_.begin(), candidates_.begin() + num_candidates_);
      for (int64_t i = 0; i < num_candidates_; ++i) {
        const float prob = prob_of(candidates_[i]);
        above += amount(prob);
        if (above >= target) return Threshold{prob, int32_t(candidates_[i])};
      }
      return Threshold{float_of(low), ALL_TIES};  // rounding lost the last ones
    }
    const float prob = float_of(low);
    return Threshold{prob, nth_tie(prob, std::ceil((target - above) / amount(prob)))};
  }

  //! The id of the n-th token of exactly this probability; ALL_TIES if there are fewer.
  int32_t nth_tie(float prob, double n) const {
    int64_t span = 0;
    for (double found = 0; span < padded_; span += SPAN) {
      Vec ties{};
      for (int64_t i = span; i < span + SPAN; i += LANES) {
        ties += load(&probs_[i]) == prob ? broadcast(1.0f) : Vec{};
      }
      const double next = found + reduce_sum(ties);
      if (next >= n) {
        for (int64_t i = span;; ++i) {
          if (probs_[i] == prob && ++found >= n) return i;
        }
      }
      found = next;
    }
    return ALL_TIES;
  }

  //! Narrows [low, high) to the threshold's interval among CUTS cuts in between.
  template <bool BY_COUNT>
  void narrow_range(double target, uint32_t& low, uint32_t& high, double& above) const {
    uint32_t cuts[CUTS];
    Vec edges[CUTS];
    double found[CUTS] = {};
    // Bisecting towards ties would take many passes: if all candidates are ties, cut right around them.
    const uint32_t first = bits_of(prob_of(candidates_[0]));
    const bool all_tied = std::all_of(candidates_.begin(), candidates_.begin() + num_candidates_,
                                       [=](uint64_t key) { return bits_of(prob_of(key)) == first; });
    for (int cut = 0; cut < CUTS; ++cut) {
      cuts[cut] = all_tied ? first + std::min(cut, 1) : low + uint64_t(high - low) * (cut + 1) / (CUTS + 1);
      edges[cut] = broadcast(float_of(cuts[cut]));
    }
    for (int64_t span = 0; span < padded_; span += SPAN) {
      Vec sums[CUTS] = {};
      for (int64_t i = span; i < span + SPAN; i += LANES) {
        const Vec probs = load(&probs_[i]), amounts = BY_COUNT ? broadcast(1.0f) : probs;
#pragma GCC unroll 4
        for (int cut = 0; cut < CUTS; ++cut) sums[cut] += probs >= edges[cut] ? amounts : Vec{};
      }
      for (int cut = 0; cut < CUTS; ++cut) found[cut] += reduce_sum(sums[cut]);
    }
    int cut = CUTS;
    while (cut > 0 && found[cut - 1] < target) --cut;  // the cuts from here on hold less than the target
    if (cut < CUTS) high = cuts[cut], above = found[cut];
    if (cut > 0) low = cuts[cut - 1];
  }

  //! Lists the tokens in [low, high) as keys that sort likeliest first, then by id. Returns false after MAX_CANDIDATES.
  bool collect_candidates(uint32_t low, uint32_t high) {
    num_candidates_ = 0;
    for (int64_t block = 0; block < padded_; block += BLOCK) {
      VecI32 inside{};
      for (int64_t i = block; i < block + BLOCK; i += LANES) {
        const VecI32 bits = (VecI32)load(&probs_[i]);
        inside |= (bits >= int32_t(low)) & (bits < int32_t(high));
      }
      if (!any(inside)) continue;
      for (int64_t i = block; i < block + BLOCK; ++i) {
        const uint32_t bits = bits_of(probs_[i]);
        candidates_[num_candidates_] = uint64_t(ALL_BITS - bits) << 32 | i;  // branchless: a branch would mispredict
        num_candidates_ += bits >= low && bits < high;
      }
      if (num_candidates_ > MAX_CANDIDATES) return false;
    }
    return true;
  }

  static constexpr uint32_t ALL_BITS = 0x7fffffff;

  static float prob_of(uint64_t key) { return float_of(ALL_BITS - (key >> 32)); }

  const int64_t size_, padded_;
  std::vector<float> probs_;  //!< [padded], zeros beyond the vocabulary
  std::vector<double> cdf_;   //!< at the end of each span
  std::vector<uint64_t> candidates_;
  int64_t num_candidates_ = 0;
};

}  // namespace pagedbatch
