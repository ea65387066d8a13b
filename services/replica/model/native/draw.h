// How a token is drawn from a row of logits. A weight is e^((logit - greatest) / temperature): 1 for the best token.
//
// Sums come in the order of the ids, or of the buckets below: the token is the same on every instruction set.
#pragma once
#include <cmath>

#include "memory.h"
#include "simd.h"

namespace chorus {

struct Draw {  // mirrored in kernels.py; a temperature of 0 takes the best token
  float temperature, min_p;
  double top_p, unit;  // unit, [0, 1): where in the distribution
  int32_t top_k;       // 0: as many as there are
};

struct Top {
  float value = -INFINITY;
  int32_t token = 0;
};

class Weights {
 public:
  Weights(const float* row, int vocab, float top, float temperature)
      : row_(row), vocab_(vocab), top_(all(top)), inverse_(all(1.0f / temperature)) {}

  // Of sixteen tokens from `at` on; past the vocabulary, and where there is no number, 0.
  vf operator()(int at) const {
    float some[LANES];
    const bool whole = at + LANES <= vocab_;
    for (int i = 0; !whole && i < LANES; i++) some[i] = at + i < vocab_ ? row_[at + i] : -INFINITY;
    const vf y = (load(whole ? row_ + at : some) - top_) * inverse_;
    return choose(y > all(-87.0f), exponential(y), vf{});
  }

 private:
  const float* row_;
  const int vocab_;
  const vf top_, inverse_;
};

// From the whole vocabulary, but for tokens less than `min_p` times as likely as the best: the first one where the
// weights up to it pass `unit` of their sum. Sixteen at a time, in order.
static inline int draw_of_all(const Weights& weights, int vocab, const Draw& draw) {
  const vf least = all(draw.min_p);
  const auto kept = [&](int at) {
    const vf w = weights(at);
    return choose(least > w, vf{}, w);
  };
  double total = 0, before = 0;
  for (int at = 0; at < vocab; at += LANES) total += sum(kept(at));
  const double target = draw.unit * total;
  int last = 0;  // of weight above 0
  for (int at = 0; at < vocab; at += LANES) {
    const vf w = kept(at);
    const double whole = sum(w);
    if (whole > 0) {
      float some[LANES];
      store(some, w);
      double inside = before;
      for (int i = 0; i < LANES && (before + whole > target || at + LANES >= vocab); i++) {
        if (!(some[i] > 0)) continue;
        last = at + i, inside += some[i];
        if (inside > target) return last;
      }
      if (before + whole > target) return last;  // the lanes' order of addition fell short of their sum by a bit
    }
    before += whole;
  }
  return last;
}

// From the best tokens only: as many as `top_k`, until they hold `top_p` of the mass, and of `min_p` at least. In the
// order of their weights, of equals the lower id first.
//
// To sort a vocabulary for that would cost more than its forward pass. Tokens are counted in buckets by the first bits
// of their weights, and only those buckets are sorted that hold the end of what is kept, or the token itself.
class DrawOfBest {
 public:
  // All the memory that a draw takes.
  void need(int vocab) {
    const size_t rows = (vocab + LANES - 1) / LANES;
    weights_.resize(rows * LANES), tokens_.reserve(vocab), sorted_.reserve(vocab), buckets_.resize(BUCKETS);
    most_.reserve(rows), ranked_.reserve(rows);
  }

  int operator()(const Weights& weights, int vocab, Top best, const Draw& draw) {
    weigh(weights, vocab);
    if (!(total_ > 0)) return best.token;
    collect(least_needed(draw, vocab), vocab);
    End end{lowest_, buckets_[lowest_].count};
    double mass = total_;
    if (draw.top_k > 0) end = ranked(draw.top_k, end), mass = mass_until(end);
    if (draw.top_p < 1) end = earlier(end, holding(draw.top_p * mass, end));
    if (draw.min_p > 0) end = earlier(end, reaching(draw.min_p));
    return place(draw.unit * mass_until(end), end);
  }

 private:
  static constexpr int SHIFT = 20;                                // leaves exponent and three bits of a float
  static constexpr int BUCKETS = (0x3f800000 >> SHIFT) + 1;       // weights are 1 at most
  struct Bucket {
    int32_t count = 0;
    double mass = 0;
  };
  struct End {  // what is kept: all of higher buckets, and the first `count` of this one
    int bucket, count;
  };

  static uint32_t bits(float weight) {
    uint32_t b;
    std::memcpy(&b, &weight, 4);
    return b;
  }
  static int bucket_of(float weight) { return std::min(int(bits(weight) >> SHIFT), BUCKETS - 1); }
  static End earlier(End a, End b) {
    return a.bucket != b.bucket ? (a.bucket > b.bucket ? a : b) : a.count < b.count ? a : b;
  }

  void weigh(const Weights& weights, int vocab) {
    most_.clear(), total_ = 0;
    for (int at = 0; at < vocab; at += LANES) {
      const vf w = weights(at);
      store(weights_.data() + at, w);
      most_.push_back(maximum(w));
      total_ += sum(w);
    }
  }

  // A weight below which no token is kept: all such tokens together hold less than top_p leaves out, or there are top_k
  // above it (counting one of each sixteen only, the best: quicker than to count all).
  float least_needed(const Draw& draw, int vocab) {
    if (draw.top_k <= 0) return std::max(draw.min_p, float(0.5 * (1.0 - draw.top_p) * total_ / vocab));
    if (draw.top_k >= int(most_.size())) return 0.0f;
    ranked_.assign(most_.begin(), most_.end());
    std::nth_element(ranked_.begin(), ranked_.begin() + (draw.top_k - 1), ranked_.end(), std::greater<float>());
    return ranked_[draw.top_k - 1];
  }

  void collect(float least, int vocab) {
    tokens_.clear();
    std::fill(buckets_.begin(), buckets_.end(), Bucket{});
    sorted_of_ = -1;
    for (size_t v = 0; v < most_.size(); v++) {
      if (!(most_[v] > 0) || most_[v] < least) continue;
      for (int id = int(v) * LANES; id < std::min(vocab, int(v + 1) * LANES); id++) {
        const float weight = weights_[id];
        if (!(weight > 0) || weight < least) continue;
        Bucket& bucket = buckets_[bucket_of(weight)];
        bucket.count++, bucket.mass += weight;
        tokens_.push_back(id);
      }
    }
    for (lowest_ = 0; !buckets_[lowest_].count;) lowest_++;
  }

  // The tokens of a bucket, best first: their weights' complements and ids.
  const std::vector<uint64_t>& sorted(int bucket) {
    if (bucket == sorted_of_) return sorted_;
    sorted_of_ = bucket, sorted_.clear();
    for (const int id : tokens_)
      if (bucket_of(weights_[id]) == bucket) sorted_.push_back(uint64_t(~bits(weights_[id])) << 32 | uint32_t(id));
    std::sort(sorted_.begin(), sorted_.end());
    return sorted_;
  }
  float weight_of(uint64_t entry) const { return weights_[uint32_t(entry)]; }

  // The end of the first `count` tokens.
  End ranked(int count, End most) const {
    for (int b = BUCKETS - 1; b >= most.bucket; b--) {
      if (buckets_[b].count >= count) return {b, count};
      count -= buckets_[b].count;
    }
    return most;
  }

  // The end of those before which there is less than `mass`.
  End holding(double mass, End most) {
    double before = 0;
    for (int b = BUCKETS - 1; b >= most.bucket; before += buckets_[b--].mass) {
      if (!buckets_[b].count || before + buckets_[b].mass < mass) continue;
      int count = 0;
      for (const uint64_t entry : sorted(b)) {
        if (count && before >= mass) break;
        before += weight_of(entry), count++;
      }
      return {b, count};
    }
    return most;
  }

  // The end of those that weigh `least` or more; the best one does.
  End reaching(float least) {
    for (int b = bucket_of(least); b < BUCKETS; b++) {
      int count = 0;
      for (const uint64_t entry : sorted(b)) count += weight_of(entry) >= least;
      if (count) return {b, count};
    }
    return {BUCKETS - 1, 1};
  }

  double mass_until(End end) {
    double mass = 0;
    for (int b = BUCKETS - 1; b > end.bucket; b--) mass += buckets_[b].mass;
    if (end.count == buckets_[end.bucket].count) return mass + buckets_[end.bucket].mass;
    const auto& entries = sorted(end.bucket);
    for (int i = 0; i < end.count; i++) mass += weight_of(entries[i]);
    return mass;
  }

  // The first token where what is kept up to it passes `target`.
  int place(double target, End end) {
    double before = 0;
    int last = 0;
    for (int b = BUCKETS - 1; b >= end.bucket; b--) {
      if (!buckets_[b].count) continue;
      if (b > end.bucket && before + buckets_[b].mass <= target) {
        before += buckets_[b].mass;
        continue;
      }
      const auto& entries = sorted(b);
      const int count = b == end.bucket ? end.count : int(entries.size());
      for (int i = 0; i < count; i++) {
        last = int(uint32_t(entries[i]));
        if ((before += weight_of(entries[i])) > target) return last;
      }
    }
    return last;  // their sum fell short of its parts by a bit
  }

  std::vector<float> weights_, most_, ranked_;  // [vocab], [vocab / 16]: the greatest of each sixteen
  std::vector<int32_t> tokens_;                 // collected, in the order of their ids
  std::vector<Bucket> buckets_;
  std::vector<uint64_t> sorted_;
  double total_ = 0;
  int lowest_ = 0, sorted_of_ = -1;
};

}  // namespace chorus
