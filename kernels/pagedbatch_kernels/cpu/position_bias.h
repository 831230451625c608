// The bias of a score by the distance of its key from its query (T5's relative position bias).

#pragma once

#include <algorithm>
#include <vector>

#include "token_locations.h"

namespace pagedbatch {

//! The table of an attention call, each head's first and last entry repeated over a chunk: so a whole chunk of keys is
//! read without a check of each key's distance.
class PositionBias {
 public:
  explicit PositionBias(const AttentionArgs& args) : reach_(args.bias_reach), width_(2 * CHUNK + 2 * reach_ - 1) {
    if (!args.position_bias) return;
    padded_.reserve(int64_t(args.num_heads) * width_);
    for (int head = 0; head < args.num_heads; ++head) {
      const float* table = args.position_bias + int64_t(head) * (2 * reach_ - 1);
      padded_.insert(padded_.end(), CHUNK, table[0]);
      padded_.insert(padded_.end(), table, table + 2 * reach_ - 1);
      padded_.insert(padded_.end(), CHUNK, table[2 * reach_ - 2]);
    }
  }

  explicit operator bool() const { return !padded_.empty(); }

  //! The biases of CHUNK keys, for the position of the first minus that of the query.
  const float* chunk(int head, int distance) const {
    const int entry = std::clamp(distance + reach_ - 1, -CHUNK, 2 * reach_ - 1);
    return padded_.data() + int64_t(head) * width_ + CHUNK + entry;
  }

 private:
  const int reach_, width_;
  std::vector<float> padded_;  //!< [num_heads][width]
};

}  // namespace pagedbatch
