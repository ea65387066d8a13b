// Paged grouped-query attention over a cache of floats, halves of either kind, or bytes.
//
// Per layer and block of 16 tokens, per KV head:   K transposed [head_dim][16]   then   V [16][head_dim]
// and, of bytes, float scales of each token:       of K [16]                     then   of V [16]
//
// so that a score of 16 tokens is one vector, and so is 16 numbers of a value. A row's sums run over its own tokens in
// the order of their blocks: the result does not depend on what else is computed, on chunking, or on who wrote the cache.
#pragma once
#include <cmath>

#include "memory.h"
#include "simd.h"

namespace chorus {

constexpr int SLOTS = 16;  // tokens in a block
#if defined(__AVX512F__)
constexpr int ROWS = 4;  // rows of a prompt at a time
constexpr int WIDE = 2;  // vectors of a value at a time
#else
constexpr int ROWS = 2;
constexpr int WIDE = 1;
#endif

enum Kv : int32_t { KV_F32, KV_BF16, KV_F16, KV_I8 };  // mirrored in kernels.py

// How a number is kept. `most`: the largest that may be kept; larger ones are cut, because a masked slot is multiplied
// by 0, and that must give 0.
template <Kv KIND> struct Kept;
template <> struct Kept<KV_F32> {
  typedef float T;
  static constexpr float most = 3.4028234e38f;
  static ALWAYS vf get(const T* p) { return load(p); }
  static ALWAYS void put(T* p, vf v) { store(p, v); }
};
template <> struct Kept<KV_BF16> {
  typedef uint16_t T;
  static constexpr float most = 3.3895314e38f;
  static ALWAYS vf get(const T* p) { return load_bfloat(p); }
  static ALWAYS void put(T* p, vf v) { store_bfloat(p, v); }
};
template <> struct Kept<KV_F16> {
  typedef half T;
  static constexpr float most = 65504.0f;
  static ALWAYS vf get(const T* p) { return load_half(p); }
  static ALWAYS void put(T* p, vf v) { store_half(p, v); }
};
template <> struct Kept<KV_I8> {
  typedef int8_t T;
  static constexpr float most = 127.0f;
  static ALWAYS vf get(const T* p) { return load_bytes(p); }
  static ALWAYS void put(T* p, vf v) {
    const vf huge = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    store_bytes(p, to_int((v + huge) - huge));
  }
};

struct Cache {
  int layers = 0, blocks = 0, kv_heads = 0, head_dim = 0;
  Kv kind = KV_F16;
  uint8_t* data = nullptr;

  size_t numbers() const { return size_t(2) * SLOTS * head_dim; }
  size_t head_bytes() const {
    return kind == KV_F32 ? numbers() * 4 : kind == KV_I8 ? numbers() + 2 * SLOTS * sizeof(float) : numbers() * 2;
  }
  size_t bytes() const { return size_t(layers) * blocks * kv_heads * head_bytes(); }
  template <Kv KIND>
  typename Kept<KIND>::T* head(int layer, int block, int kv) const {
    return reinterpret_cast<typename Kept<KIND>::T*>(
        data + ((size_t(layer) * blocks + block) * kv_heads + kv) * head_bytes());
  }
  float* scales(int8_t* head) const { return reinterpret_cast<float*>(head + numbers()); }

  void write(int layer, int block, int slot, int kv, const float* k, const float* v) const {
    switch (kind) {
      case KV_F32: return write_as<KV_F32>(layer, block, slot, kv, k, v);
      case KV_BF16: return write_as<KV_BF16>(layer, block, slot, kv, k, v);
      case KV_F16: return write_as<KV_F16>(layer, block, slot, kv, k, v);
      case KV_I8: return write_as<KV_I8>(layer, block, slot, kv, k, v);
    }
  }

 private:
  template <Kv KIND>
  void write_as(int layer, int block, int slot, int kv, const float* k, const float* v) const {
    typedef Kept<KIND> Number;
    const vf most = all(Number::most);
    auto* keys = head<KIND>(layer, block, kv);
    auto* values = keys + SLOTS * head_dim + slot * head_dim;
    typename Number::T column[LANES];
    vf k_inverse = all(1.0f), v_inverse = k_inverse;
    if constexpr (KIND == KV_I8) {
      k_inverse = scaled(k, scales(keys)[slot]);
      v_inverse = scaled(v, scales(keys)[SLOTS + slot]);
    }
    const auto cut = [&](vf x) { return -larger(-larger(x, -most), -most); };
    for (int d = 0; d < head_dim; d += LANES) {
      Number::put(column, cut(load(k + d) * k_inverse));
      for (int i = 0; i < LANES; i++) keys[(d + i) * SLOTS + slot] = column[i];
      Number::put(values + d, cut(load(v + d) * v_inverse));
    }
  }

  // The scale of a row of bytes, and what its numbers are multiplied by.
  vf scaled(const float* row, float& scale) const {
    vf top{};
    for (int d = 0; d < head_dim; d += LANES) top = larger(top, larger(load(row + d), -load(row + d)));
    const float greatest = maximum(top);
    scale = greatest > 3e38f ? 3e38f / 127.0f : greatest / 127.0f;
    return all(scale > 1e-30f ? 1.0f / scale : 0.0f);
  }
};

// `R` rows at positions first..first+R-1 of one sequence, `G` query heads of KV head `kv`.
// q[r], out[r]: the row's G heads of head_dim floats; q is scaled already. `room` holds R * G * (context + 16) floats.
// With a window a row sees itself and the window - 1 tokens before it.
template <Kv KIND, int R, int G>
static void attend(const Cache& cache, int layer, int kv, const int32_t* table, int first, int window,
                   const float* const* q, float* const* out, float* room) {
  typedef Kept<KIND> Number;
  const int dim = cache.head_dim, blocks = (first + R - 1) / SLOTS + 1, stride = blocks * SLOTS;
  const int begin = window && first >= window ? (first - window + 1) / SLOTS : 0;
  const vf nothing = all(-INFINITY);
  vf most[R * G];
  for (int i = 0; i < R * G; i++) most[i] = nothing;
  for (int b = begin; b < blocks; b++) {
    auto* const k = cache.head<KIND>(layer, table[b], kv);
    vf score[R * G];
#pragma GCC unroll 16
    for (int i = 0; i < R * G; i++) score[i] = vf{};
    for (int d = 0; d < dim; d++) {
      const vf key = Number::get(k + d * SLOTS);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) score[r * G + g] = fma(all(q[r][g * dim + d]), key, score[r * G + g]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const auto hidden = lanes() > all(float(first + r - b * SLOTS));
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) {
        const int i = r * G + g;
        if constexpr (KIND == KV_I8) score[i] = score[i] * load(cache.scales(k));
        score[i] = choose(hidden, nothing, score[i]);
        if (window) score[i] = choose(all(float(first + r - window + 1 - b * SLOTS)) > lanes(), nothing, score[i]);
        most[i] = larger(most[i], score[i]);
        store(room + i * stride + b * SLOTS, score[i]);
      }
    }
  }
  float inverse[R * G];
  for (int r = 0; r < R; r++) {
    const int own = (first + r) / SLOTS + 1;  // blocks this row may see
    for (int i = r * G; i < (r + 1) * G; i++) {
      float* at = room + i * stride + begin * SLOTS;
      const vf top = all(maximum(most[i]));
      vf total{};
      for (int b = begin; b < own; b++, at += SLOTS) {
        const vf s = load(at), e = choose(s > all(-1e30f), exponential(s - top), vf{});
        if constexpr (KIND == KV_I8) store(at, e * load(cache.scales(cache.head<KIND>(layer, table[b], kv)) + SLOTS));
        else store(at, e);
        total = total + e;
      }
      for (int b = own; b < blocks; b++, at += SLOTS) store(at, vf{});
      inverse[i] = 1.0f / sum(total);
    }
  }
  for (int part = 0; part < dim; part += WIDE * LANES) {
    vf total[WIDE * R * G];
#pragma GCC unroll 32
    for (int i = 0; i < WIDE * R * G; i++) total[i] = vf{};
    for (int b = begin; b < blocks; b++) {
      const auto* v = cache.head<KIND>(layer, table[b], kv) + SLOTS * dim + part;
      for (int t = 0; t < SLOTS; t++, v += dim) {
        vf value[WIDE];
#pragma GCC unroll 2
        for (int w = 0; w < WIDE; w++) value[w] = Number::get(v + w * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < R * G; i++) {
          const vf p = all(room[i * stride + b * SLOTS + t]);
#pragma GCC unroll 2
          for (int w = 0; w < WIDE; w++) total[i * WIDE + w] = fma(p, value[w], total[i * WIDE + w]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int g = 0; g < G; g++)
        for (int w = 0, i = r * G + g; w < WIDE; w++)
          store(out[r] + g * dim + part + w * LANES, total[i * WIDE + w] * all(inverse[i]));
  }
}

}  // namespace chorus
