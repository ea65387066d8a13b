// Keys and values in blocks of 16 tokens: floats, halves of either kind, or bytes.
//
// Per layer and block, per KV head    floats, halves    K transposed [head_dim][16]         V [16][head_dim]
//                                     bytes             K in pairs [head_dim / 2][16][2]    V in pairs [8][head_dim][2]
//                                                       and float scales of each token, of K [16], of V [16]
//
// so that a score of 16 tokens is one vector, and so is 16 numbers of a value; of bytes two products make one of them.
#pragma once
#include <cmath>

#include "memory.h"
#include "simd.h"

namespace chorus {

constexpr int SLOTS = 16;           // tokens in a block
constexpr int BYTES_DIM_MAX = 512;  // of a head in bytes: 512 * 127 * 32767 is the most that a whole number may be

enum Kv : int32_t { KV_F32, KV_BF16, KV_F16, KV_I8 };  // mirrored in kernels.py

// How a number is kept. `most`: the largest that may be kept; larger ones are cut, because a masked slot is multiplied
// by 0, and that must give 0. Bytes have a scale instead.
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
};

// To the nearest whole number, of those that have one within 22 bits.
static ALWAYS vi whole(vf x) {
  const vf huge = all(12582912.0f);  // 1.5 * 2^23: adding it rounds
  return to_int((x + huge) - huge);
}

// A row as whole numbers -most..most, sixteen to `put(place, codes)` at a time; returns the scale that undoes it. What
// is no row of numbers becomes zeros: a scale stands beside others', which it must not spoil.
template <class Put>
static ALWAYS float to_codes(const float* row, int count, float most, const Put& put) {
  vf top{}, nothing{};  // nothing: 0, or not a number where one of the row is none or infinite
  for (int d = 0; d < count; d += LANES) {
    const vf x = load(row + d);
    top = larger(top, larger(x, -x)), nothing = nothing + (x - x);
  }
  const float greatest = maximum(top);
  const bool usable = sum(nothing) == 0 && greatest > most * 1e-30f;
  const float scale = usable ? greatest / most : 0.0f;
  const vf inverse = all(usable ? 1.0f / scale : 0.0f);
  for (int d = 0; d < count; d += LANES) put(d, usable ? whole(load(row + d) * inverse) : vi{});
  return scale;
}

// How many numbers of a row are mixed with each other: the largest power of two that divides their number.
static inline int mixed_together(int dim) { return dim & -dim; }

template <int S>
static ALWAYS vf mix_lanes(vf x) {  // lane i, and with i ^ S: their sum, and their difference
  float sign[LANES];
  for (int i = 0; i < LANES; i++) sign[i] = i & S ? -1.0f : 1.0f;
  return swapped<S>(x) + x * load(sign);
}

// A row whose numbers are mixed (a Hadamard transform) and scaled: where few are much larger than the rest, which costs
// the rest their precision in bytes, all become alike. The product of two mixed rows is theirs times mixed_together, and
// a row mixed twice is itself times that. `to` may be `row`.
static inline void mix(const float* row, int dim, float scale, float* to) {
  const int block = mixed_together(dim);
  for (int d = 0; d < dim; d += LANES)
    store(to + d, mix_lanes<1>(mix_lanes<2>(mix_lanes<4>(mix_lanes<8>(load(row + d) * all(scale))))));
  for (int step = LANES; step < block; step *= 2)
    for (int d = 0; d < dim; d += 2 * step)
      for (int i = d; i < d + step; i += LANES) {
        const vf a = load(to + i), b = load(to + i + step);
        store(to + i, a + b), store(to + i + step, a - b);
      }
}

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
  const float* scales(const int8_t* head) const { return reinterpret_cast<const float*>(head + numbers()); }

  void write(int layer, int block, int slot, int kv, const float* k, const float* v) const {
    switch (kind) {
      case KV_F32: return write_as<KV_F32>(layer, block, slot, kv, k, v);
      case KV_BF16: return write_as<KV_BF16>(layer, block, slot, kv, k, v);
      case KV_F16: return write_as<KV_F16>(layer, block, slot, kv, k, v);
      case KV_I8: return write_bytes(layer, block, slot, kv, k, v);
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
    const auto cut = [&](vf x) { return -larger(-larger(x, -most), -most); };
    for (int d = 0; d < head_dim; d += LANES) {
      Number::put(column, cut(load(k + d)));
      for (int i = 0; i < LANES; i++) keys[(d + i) * SLOTS + slot] = column[i];
      Number::put(values + d, cut(load(v + d)));
    }
  }

  void write_bytes(int layer, int block, int slot, int kv, const float* k, const float* v) const {
    int8_t* const keys = head<KV_I8>(layer, block, kv);
    int8_t* const values = keys + SLOTS * head_dim + slot / 2 * 2 * head_dim + slot % 2;
    scales(keys)[slot] = to_bytes(k, [&](int d, int8_t code) { keys[(d / 2 * SLOTS + slot) * 2 + d % 2] = code; });
    scales(keys)[SLOTS + slot] = to_bytes(v, [&](int d, int8_t code) { values[d * 2] = code; });
  }

  template <class Put>
  float to_bytes(const float* row, const Put& put) const {
    float mixed[BYTES_DIM_MAX];
    mix(row, head_dim, 1.0f, mixed);
    return to_codes(mixed, head_dim, 127.0f, [&](int d, vi codes) {
      int8_t bytes[LANES];
      store_bytes(bytes, codes);
      for (int i = 0; i < LANES; i++) put(d + i, bytes[i]);
    });
  }
};

}  // namespace chorus
