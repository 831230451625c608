// One row's weights, and the draw from them: top-k, top-p, min-p and the inverse of the running sum. Knows no batch.
//
// No sorting of the vocabulary: a border is closed in on by passes that weigh everything above several cuts at once,
// until few tokens are left between two of them, and only those are ranked.

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

inline bool any(Ints mask) {
  uint64_t words[LANES / 2], found = 0;
  std::memcpy(words, &mask, sizeof mask);
  for (uint64_t word : words) found |= word;
  return found;
}

//! The largest of `size` scores that are numbers; -inf if there are none.
template <class T>
float largest_of(const T* scores, int64_t size) {
  constexpr int STEP = 4;
  Vec most[STEP];
  std::fill_n(most, STEP, broadcast(-INFINITE));
  int64_t i = 0;
  for (; i + STEP * LANES <= size; i += STEP * LANES) {
    for (int j = 0; j < STEP; ++j) most[j] = larger(load(scores + i + j * LANES), most[j]);
  }
  float result = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  for (; i < size; ++i) {
    const float score = to_float(scores[i]);
    result = score > result ? score : result;
  }
  return result;
}

//! The last token that stays, likeliest first and lower ids first among equals.
struct Border {
  float weight;
  int32_t token_id;
};

constexpr int32_t ALL_EQUALS = std::numeric_limits<int32_t>::max();

class Weights {
 public:
  explicit Weights(int64_t size)
      : size_(size), padded_((size + SPAN - 1) / SPAN * SPAN), weights_(padded_), ends_(padded_ / SPAN), near_(FEW + BLOCK) {}

  //! Takes e^((score - largest) / temperature) for the weights: the likeliest token's is 1. Any temperature above 0.
  template <class T>
  void take(const T* scores, float temperature) {
    const float top = largest_of(scores, size_), slope = 1.0f / temperature;
    const int64_t whole = size_ / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
      store(&weights_[i], exp((load(scores + i) - top) * slope));
    }
    if (whole < size_) {
      const int count = size_ - whole;
      store(&weights_[whole], exp((load(scores + whole, count) - top) * slope), count);
    }
  }

  void keep_top_k(int64_t count) { keep(Border{border<true>(count, no_lighter_than(count)).weight, ALL_EQUALS}); }

  void keep_top_p(double share) {
    const double total = sum_up(), target = share * total;
    // All tokens lighter than this together weigh less than what may go: the border is not among them.
    const float lightest = (total - target) / size_;
    keep(border<false>(target, std::max(lightest, SMALLEST)));
  }

  void keep_min_p(float share) { keep(Border{share, ALL_EQUALS}); }

  //! Sums of the weights up to each span's end, for `draw`. Returns the last.
  double sum_up() {
    double total = 0;
    for (int64_t span = 0; span < padded_ / SPAN; ++span) {
      Vec sums{};
      for (int64_t i = span * SPAN; i < (span + 1) * SPAN; i += LANES) sums += load(&weights_[i]);
      ends_[span] = total += sum(sums);
    }
    return total;
  }

  //! The token at which the running sum passes `point` of the whole, 0 <= point < 1; 0 where nothing has weight.
  int64_t draw(double point) const {
    const double target = point * ends_.back();
    // The first end strictly above the target: what has no weight is skipped.
    const int64_t span = std::upper_bound(ends_.begin(), ends_.end(), target) - ends_.begin();
    if (span == int64_t(ends_.size())) return 0;
    double end = span ? ends_[span - 1] : 0.0;
    // The span's own sum may be rounded up a little above the last `end`: then its last token with weight is meant.
    int64_t drawn = 0;
    for (int64_t i = span * SPAN; i < (span + 1) * SPAN; ++i) {
      if (weights_[i] == 0.0f) continue;
      drawn = i;
      end += weights_[i];
      if (end > target) break;
    }
    return drawn;
  }

 private:
  //! Tokens summed in floats before doubles take over: rounding stays below 1e-6 of the whole.
  static constexpr int SPAN = 256;
  static constexpr int CUTS = 3;
  //! Few enough tokens to rank.
  static constexpr int64_t FEW = 256;
  static constexpr int BLOCK = 64;
  static constexpr float SMALLEST = std::numeric_limits<float>::min();

  //! Zeroes what comes after the border.
  void keep(Border last) {
    Ints ids = lane_numbers();
    for (int64_t i = 0; i < padded_; i += LANES, ids += LANES) {
      const Vec weights = load(&weights_[i]);
      const Ints stays = (weights > last.weight) | ((weights == last.weight) & (ids <= last.token_id));
      store(&weights_[i], stays ? weights : Vec{});
    }
  }

  //! A weight that the `count` largest have at least: each of so many spans holds one.
  float no_lighter_than(int64_t count) const {
    const int64_t num_spans = padded_ / SPAN;
    if (count > num_spans) return SMALLEST;
    std::vector<float> maxima(num_spans);
    for (int64_t span = 0; span < num_spans; ++span) maxima[span] = largest_of(&weights_[span * SPAN], SPAN);
    std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<float>());
    return std::max(maxima[count - 1], SMALLEST);
  }

  //! The last token before which there is less than `target`, likeliest first. Counted or weighed.
  //!
  //! Tokens lighter than `lightest` are beyond it. Bits of positive floats rise with their values.
  template <bool COUNTED>
  Border border(double target, float lightest) {
    uint32_t low = bits_of(lightest), high = bits_of(1.0f) + 1;  // it lies in [low, high)
    double above = 0;                                            // what weighs float_of(high) or more
    const auto amount = [](float weight) { return COUNTED ? 1.0 : weight; };
    while (high - low > 1) {
      if (!collect(low, high)) {
        narrow<COUNTED>(target, low, high, above);
        continue;
      }
      std::sort(near_.begin(), near_.begin() + num_near_);
      for (int64_t i = 0; i < num_near_; ++i) {
        const float weight = weight_of(near_[i]);
        above += amount(weight);
        if (above >= target) return Border{weight, int32_t(near_[i])};
      }
      return Border{float_of(low), ALL_EQUALS};  // the last ones are lost to rounding
    }
    const float weight = float_of(low);
    return Border{weight, nth_equal(weight, std::ceil((target - above) / amount(weight)))};
  }

  //! The id of the `n`-th token of this weight, or of all where there are fewer.
  int32_t nth_equal(float weight, double n) const {
    int64_t span = 0;
    for (double found = 0; span < padded_; span += SPAN) {
      Vec equals{};
      for (int64_t i = span; i < span + SPAN; i += LANES) {
        equals += load(&weights_[i]) == weight ? broadcast(1.0f) : Vec{};
      }
      const double next = found + sum(equals);
      if (next >= n) {
        for (int64_t i = span;; ++i) {
          if (weights_[i] == weight && ++found >= n) return i;
        }
      }
      found = next;
    }
    return ALL_EQUALS;
  }

  //! Moves `low` or `high`, or both, to the two neighbours among CUTS weights between them that hold the border.
  template <bool COUNTED>
  void narrow(double target, uint32_t& low, uint32_t& high, double& above) const {
    uint32_t cuts[CUTS];
    Vec edges[CUTS];
    double found[CUTS] = {};
    // Equals would take many passes to close in on: where all that were listed are, they are cut out at once.
    const uint32_t first = bits_of(weight_of(near_[0]));
    const bool are_equal = std::all_of(near_.begin(), near_.begin() + num_near_,
                                       [=](uint64_t key) { return bits_of(weight_of(key)) == first; });
    for (int cut = 0; cut < CUTS; ++cut) {
      cuts[cut] = are_equal ? first + std::min(cut, 1) : low + uint64_t(high - low) * (cut + 1) / (CUTS + 1);
      edges[cut] = broadcast(float_of(cuts[cut]));
    }
    for (int64_t span = 0; span < padded_; span += SPAN) {
      Vec sums[CUTS] = {};
      for (int64_t i = span; i < span + SPAN; i += LANES) {
        const Vec weights = load(&weights_[i]), amounts = COUNTED ? broadcast(1.0f) : weights;
#pragma GCC unroll 4
        for (int cut = 0; cut < CUTS; ++cut) sums[cut] += weights >= edges[cut] ? amounts : Vec{};
      }
      for (int cut = 0; cut < CUTS; ++cut) found[cut] += sum(sums[cut]);
    }
    int cut = CUTS;
    while (cut > 0 && found[cut - 1] < target) --cut;  // the cuts from here on hold less than the target
    if (cut < CUTS) high = cuts[cut], above = found[cut];
    if (cut > 0) low = cuts[cut - 1];
  }

  //! Lists the tokens in [low, high) as keys that rise as weights fall, then with ids. False, and some, if not few.
  bool collect(uint32_t low, uint32_t high) {
    num_near_ = 0;
    for (int64_t block = 0; block < padded_; block += BLOCK) {
      Ints inside{};
      for (int64_t i = block; i < block + BLOCK; i += LANES) {
        const Ints bits = (Ints)load(&weights_[i]);
        inside |= (bits >= int32_t(low)) & (bits < int32_t(high));
      }
      if (!any(inside)) continue;
      for (int64_t i = block; i < block + BLOCK; ++i) {
        const uint32_t bits = bits_of(weights_[i]);
        near_[num_near_] = uint64_t(ALL_BITS - bits) << 32 | i;  // without a branch: it could not be foreseen
        num_near_ += bits >= low && bits < high;
      }
      if (num_near_ > FEW) return false;
    }
    return true;
  }

  static constexpr uint32_t ALL_BITS = 0x7fffffff;

  static float weight_of(uint64_t key) { return float_of(ALL_BITS - (key >> 32)); }

  const int64_t size_, padded_;
  std::vector<float> weights_;  //!< [padded], zeros behind the vocabulary
  std::vector<double> ends_;    //!< [spans]
  std::vector<uint64_t> near_;  //!< the first `num_near_` of them: tokens near a border
  int64_t num_near_ = 0;
};

}  // namespace pagedbatch
