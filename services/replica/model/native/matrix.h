// Quantised matrices in panels of 16 output columns, and their product with quantised rows.
//
// A weight is d * code + m per block of 32 inputs, codes unsigned: Q4_1 as the file has it; Q4_0 with m = -8 d and Q8_0
// with m = -128 d (its codes shifted by 128), so that one product serves them all. An activation is s * q, q int8,
// per block of 32, with s * (sum of q) beside it for the minimum's share:
//
//     y[row, col] = sum over blocks  d * s * (sum of code * q)  +  m * (s * sum of q)
//
// Panel layout, per block of 32 inputs:  groups g of 4 inputs, each 64 bytes: column 0 inputs 4g..4g+3, column 1 ...
//     4-bit: 4 x 64 bytes, low half of a byte = group g, high half = group g + 4;  8-bit: 8 x 64 bytes
//     then d[16] and, for Q4_1, m[16], as halves
//
// A row's result is the same to the bit whatever rows are computed beside it: integer sums are exact, and the float
// operations of a row and column always come in the order of the blocks.
#pragma once
#include <cmath>
#include <cstdlib>
#include <vector>

#include "simd.h"

namespace chorus {

constexpr int BLOCK = 32;    // inputs that share a scale
constexpr int GROUPS = 8;    // groups of 4 inputs in a block
#if defined(__AVX512F__)
constexpr int TILE = 8;      // rows at a time: what the registers hold
#else
constexpr int TILE = 4;
#endif

enum Kind { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 };

struct Matrix {
  int rows_out = 0, cols_in = 0, panels = 0, blocks = 0;
  Kind kind = Q4_1;
  size_t block_bytes = 0;
  uint8_t* data = nullptr;

  int code_bytes() const { return kind == Q8_0 ? GROUPS * 64 : GROUPS * 32; }
  const uint8_t* panel(int p) const { return data + size_t(p) * blocks * block_bytes; }
};

// Rows as int8 with their scales; `passes` rows each in the precise mode (value and residual).
struct Rows {
  int8_t* codes;   // [rows * passes][cols]
  float* scales;   // [rows * passes][cols / 32]
  float* sums;     // [rows * passes][cols / 32]
};

static inline int code_of(const uint8_t* block, Kind kind, int i) {
  switch (kind) {
    case Q4_1: return i < 16 ? block[4 + i] & 15 : block[4 + i - 16] >> 4;
    case Q4_0: return i < 16 ? block[2 + i] & 15 : block[2 + i - 16] >> 4;
    default: return int8_t(block[2 + i]) + 128;
  }
}

static inline size_t raw_block_bytes(Kind kind) { return kind == Q4_1 ? 20 : kind == Q4_0 ? 18 : 34; }

// Repack rows [first, first + count) of a file's tensor as panels; `interleave` puts a second tensor's panels between.
static inline void pack_panel(Matrix& m, int panel, const uint8_t* raw, int row0, int rows) {
  const size_t raw_row = size_t(m.blocks) * raw_block_bytes(m.kind);
  uint8_t* out = m.data + size_t(panel) * m.blocks * m.block_bytes;
  for (int b = 0; b < m.blocks; b++, out += m.block_bytes) {
    std::memset(out, 0, m.block_bytes);
    half* d = reinterpret_cast<half*>(out + m.code_bytes());
    for (int c = 0; c < LANES && row0 + c < rows; c++) {
      const uint8_t* block = raw + (row0 + c) * raw_row + b * raw_block_bytes(m.kind);
      std::memcpy(&d[c], block, 2);
      if (m.kind == Q4_1) std::memcpy(&d[LANES + c], block + 2, 2);
      for (int i = 0; i < BLOCK; i++) {
        const int g = i / 4, at = c * 4 + i % 4, code = code_of(block, m.kind, i);
        if (m.kind == Q8_0) out[g * 64 + at] = uint8_t(code);
        else out[(g % 4) * 64 + at] |= uint8_t(g < 4 ? code : code << 4);
      }
    }
  }
}

static inline Matrix make_matrix(Kind kind, int rows_out, int cols_in) {
  Matrix m;
  m.kind = kind;
  m.rows_out = rows_out;
  m.cols_in = cols_in;
  m.panels = (rows_out + LANES - 1) / LANES;
  m.blocks = cols_in / BLOCK;
  m.block_bytes = m.code_bytes() + (kind == Q4_1 ? 64 : 32);
  const size_t bytes = (size_t(m.panels) * m.blocks * m.block_bytes + 63) / 64 * 64;
  m.data = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
  return m;
}

// One row of `cols` floats -> int8 per block of 32. With `residual`, a second row holds what the first one missed.
static inline void quantise_row(const float* x, int cols, const Rows& to, int row, bool residual) {
  const int blocks = cols / BLOCK, passes = residual ? 2 : 1;
  for (int b = 0; b < blocks; b++) {
    const vf v[2] = {load(x + b * BLOCK), load(x + b * BLOCK + LANES)};
    const float most = maximum(larger(larger(v[0], -v[0]), larger(v[1], -v[1])));
    float scale = most / 127.0f;
    vf rest[2] = {v[0], v[1]};
    for (int pass = 0; pass < passes; pass++) {
      const size_t at = size_t(row) * passes + pass;
      const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
      int8_t* q = to.codes + at * cols + b * BLOCK;
      vi total{};
      for (int h = 0; h < 2; h++) {
        const vf rounded = fma(rest[h], all(inverse), all(12582912.0f)) - all(12582912.0f);
        const vi n = __builtin_convertvector(rounded, vi);
        total += n;
        for (int i = 0; i < LANES; i++) q[h * LANES + i] = int8_t(n[i]);
        rest[h] = fma(rounded, all(-scale), rest[h]);
      }
      int count = 0;
      for (int i = 0; i < LANES; i++) count += total[i];
      to.scales[at * blocks + b] = scale;
      to.sums[at * blocks + b] = scale * float(count);
      scale /= 254.0f;
    }
  }
}

static ALWAYS int32_t four(const int8_t* q) {
  int32_t x;
  std::memcpy(&x, q, 4);
  return x;
}

// --- the product of one block: codes of 16 columns with R rows -> exact int32 sums ----------------------------

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

template <int R, bool EIGHT>
static ALWAYS void block_dot(const uint8_t* codes, const int8_t* const* q, int at, vi* sums) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512i total[R];
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; g++) {
    __m512i w;
    if (EIGHT) w = _mm512_load_si512(codes + g * 64);
    else {
      w = _mm512_load_si512(codes + (g & 3) * 64);
      w = _mm512_and_si512(g < 4 ? w : _mm512_srli_epi16(w, 4), low);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = _mm512_dpbusd_epi32(total[r], w, _mm512_set1_epi32(four(q[r] + at + g * 4)));
  }
  for (int r = 0; r < R; r++) sums[r] = (vi)total[r];
}

#elif defined(__AVX2__)

// u4 x s8 pairs, summed 8 groups deep in int16: at most 8 * 2 * 15 * 127 = 30,480. Eight bits are two planes of four.
template <int R, bool EIGHT>
static ALWAYS void block_dot(const uint8_t* codes, const int8_t* const* q, int at, vi* sums) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int side = 0; side < 2; side++) {
    __m256i near[R], far[R];
    for (int r = 0; r < R; r++) near[r] = far[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
      const __m256i raw = _mm256_load_si256((const __m256i*)(codes + (EIGHT ? g : g & 3) * 64 + side * 32));
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low), under = _mm256_and_si256(raw, low);
      for (int r = 0; r < R; r++) {
        const __m256i a = _mm256_set1_epi32(four(q[r] + at + g * 4));
        if (EIGHT) far[r] = _mm256_add_epi16(far[r], _mm256_maddubs_epi16(high, a));
        near[r] = _mm256_add_epi16(near[r], _mm256_maddubs_epi16(EIGHT || g < 4 ? under : high, a));
      }
    }
    for (int r = 0; r < R; r++) {
      __m256i total = _mm256_madd_epi16(near[r], ones);
      if (EIGHT) total = _mm256_add_epi32(total, _mm256_slli_epi32(_mm256_madd_epi16(far[r], ones), 4));
      reinterpret_cast<__m256i*>(&sums[r])[side] = total;
    }
  }
}

#else

template <int R, bool EIGHT>
static ALWAYS void block_dot(const uint8_t* codes, const int8_t* const* q, int at, vi* sums) {
  for (int r = 0; r < R; r++) {
    int32_t total[LANES] = {};
    for (int g = 0; g < GROUPS; g++) {
      const uint8_t* w = codes + (EIGHT ? g : g & 3) * 64;
      for (int c = 0; c < LANES; c++)
        for (int i = 0; i < 4; i++) {
          const int code = EIGHT ? w[c * 4 + i] : g < 4 ? w[c * 4 + i] & 15 : w[c * 4 + i] >> 4;
          total[c] += code * q[r][at + g * 4 + i];
        }
    }
    std::memcpy(&sums[r], total, sizeof total);
  }
}

#endif

// R rows with P neighbouring panels: out[p * R + r] holds 16 columns. Several panels hide the latency of few rows.
template <int R, int P, Kind KIND>
static ALWAYS void tile(const Matrix& m, int panel, const Rows& rows, int row, vf* out) {
  constexpr bool EIGHT = KIND == Q8_0;
  const int cols = m.cols_in, blocks = m.blocks;
  const int8_t* q[R];
  for (int r = 0; r < R; r++) q[r] = rows.codes + size_t(row + r) * cols;
  const float *scales = rows.scales + size_t(row) * blocks, *shares = rows.sums + size_t(row) * blocks;
  vf total[R * P];
  for (int i = 0; i < R * P; i++) total[i] = vf{};
  const uint8_t* at[P];
  for (int p = 0; p < P; p++) at[p] = m.panel(panel + p);
  for (int b = 0; b < blocks; b++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++, at[p - 1] += m.block_bytes) {
      vi sums[R];
      block_dot<R, EIGHT>(at[p], q, b * BLOCK, sums);
      const half* d = reinterpret_cast<const half*>(at[p] + (EIGHT ? 512 : 256));
      const vf scale = load_half(d);
      const vf least = KIND == Q4_1 ? load_half(d + LANES) : scale * all(EIGHT ? -128.0f : -8.0f);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        vf& t = total[p * R + r];
        t = fma(__builtin_convertvector(sums[r], vf), scale * all(scales[r * blocks + b]), t);
        t = fma(least, all(shares[r * blocks + b]), t);
      }
    }
  }
  for (int i = 0; i < R * P; i++) out[i] = total[i];
}

// Panels [from, to) of the product with `count` rows. `put(panel, row, values)` takes each 16 columns of a row, of P
// panels at a time: values[0..P). In the precise mode a row is two: its value and its residual, added here.
template <int P, Kind KIND, class Put>
static void product_of(const Matrix& m, int from, int to, const Rows& rows, int count, bool residual, const Put& put) {
  const int total = residual ? count * 2 : count;
  vf out[TILE * P], one[P];
  for (int panel = from; panel < to; panel += P) {
    for (int row = 0; row < total;) {
      const int left = total - row;
      int n;
      if (left >= TILE) tile<TILE, P, KIND>(m, panel, rows, row, out), n = TILE;
      else if (left >= 4) tile<4, P, KIND>(m, panel, rows, row, out), n = 4;
      else if (left >= 2) tile<2, P, KIND>(m, panel, rows, row, out), n = 2;
      else tile<1, P, KIND>(m, panel, rows, row, out), n = 1;
      const int step = residual ? 2 : 1;
      for (int r = 0; r < n; r += step) {
        for (int p = 0; p < P; p++) one[p] = residual ? out[p * n + r] + out[p * n + r + 1] : out[p * n + r];
        put(panel, (row + r) / step, one);
      }
      row += n;
    }
  }
}

template <int P, class Put>
static void product(const Matrix& m, int from, int to, const Rows& rows, int count, bool residual, const Put& put) {
  switch (m.kind) {
    case Q4_1: return product_of<P, Q4_1>(m, from, to, rows, count, residual, put);
    case Q4_0: return product_of<P, Q4_0>(m, from, to, rows, count, residual, put);
    case Q8_0: return product_of<P, Q8_0>(m, from, to, rows, count, residual, put);
  }
}

}  // namespace chorus
