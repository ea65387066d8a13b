// Quantised matrices in panels of 16 output columns, and their product with quantised rows.
//
// A weight is d * code + m per block of 32 inputs, codes unsigned: Q4_1 as the file has it; Q4_0 with m = -8 d and Q8_0
// with m = -128 d (its codes shifted by 128). An activation is s * q, q int8, per block of 32:
//
//     Q4_1          y[row, col] = sum over blocks  d * s * (sum of code * q)  +  m * s * (sum of q)
//     Q4_0, Q8_0    y[row, col] = sum over blocks  d * s * (sum of code * q  -  8 or 128 * sum of q)
//
// Panel layout, per block of 32 inputs:  groups g of 4 inputs, each 64 bytes: column 0 inputs 4g..4g+3, column 1 ...
//     4-bit: 4 x 64 bytes, low half of a byte = group g, high half = group g + 4;  8-bit: 8 x 64 bytes
//     then d[16] and, for Q4_1, m[16], as halves
//
// A row's result is the same to the bit whatever rows are computed beside it: integer sums are exact, and the float
// operations of a row and column always come in the order of the blocks.
#pragma once
#include "memory.h"
#include "simd.h"

namespace chorus {

constexpr int BLOCK = 32;  // inputs that share a scale
constexpr int GROUPS = 8;  // groups of 4 inputs in a block
#if defined(__AVX512F__)
constexpr int TILE = 8;  // rows at a time: what the registers hold
#else
constexpr int TILE = 4;
#endif

enum Kind { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 };  // the file format's numbers

constexpr size_t raw_block_bytes(Kind kind) { return kind == Q4_1 ? 20 : kind == Q4_0 ? 18 : 34; }
constexpr int code_bytes(Kind kind) { return kind == Q8_0 ? GROUPS * 64 : GROUPS * 32; }
constexpr int zero_code(Kind kind) { return kind == Q4_1 ? 0 : kind == Q4_0 ? 8 : 128; }

struct Matrix {
  Kind kind = Q4_1;
  int panels = 0, blocks = 0;
  size_t block_bytes = 0;
  uint8_t* data = nullptr;

  const uint8_t* block(int panel, int b) const { return data + (size_t(panel) * blocks + b) * block_bytes; }
};

static inline Matrix make_matrix(Memory& memory, Kind kind, int panels, int cols_in) {
  Matrix m{kind, panels, cols_in / BLOCK, size_t(code_bytes(kind)) + (kind == Q4_1 ? 64 : 32), nullptr};
  m.data = memory.take(size_t(m.panels) * m.blocks * m.block_bytes);
  return m;
}

// Up to 16 rows of a file's tensor, from `raw` on, become a panel; columns past `count` give 0.
static inline void pack_panel(Matrix& m, int panel, const uint8_t* raw, int count) {
  const size_t raw_row = m.blocks * raw_block_bytes(m.kind);
  for (int b = 0; b < m.blocks; b++) {
    uint8_t* out = const_cast<uint8_t*>(m.block(panel, b));
    half* d = reinterpret_cast<half*>(out + code_bytes(m.kind));
    std::memset(out, 0, m.block_bytes);
    for (int c = 0; c < LANES && c < count; c++) {
      const uint8_t *from = raw + c * raw_row + b * raw_block_bytes(m.kind), *codes = from + (m.kind == Q4_1 ? 4 : 2);
      std::memcpy(&d[c], from, 2);
      if (m.kind == Q4_1) std::memcpy(&d[LANES + c], from + 2, 2);
      for (int i = 0; i < BLOCK; i++) {
        const int g = i / 4, at = c * 4 + i % 4;
        if (m.kind == Q8_0) out[g * 64 + at] = uint8_t(codes[i] + 128);
        else out[g % 4 * 64 + at] |= uint8_t((i < 16 ? codes[i] & 15 : codes[i - 16] >> 4) << (g < 4 ? 0 : 4));
      }
    }
  }
}

// Row `row` of the file's tensor (a column of the panels) as floats: an embedding.
static inline void unpack_row(const Matrix& m, int row, float* to) {
  const int c = row % LANES;
  for (int b = 0; b < m.blocks; b++) {
    const uint8_t* in = m.block(row / LANES, b);
    const half* d = reinterpret_cast<const half*>(in + code_bytes(m.kind));
    const float scale = half_to_float(d[c]), least = m.kind == Q4_1 ? half_to_float(d[LANES + c]) : 0.0f;
    for (int i = 0; i < BLOCK; i++) {
      const int g = i / 4, at = c * 4 + i % 4;
      const int code = m.kind == Q8_0 ? in[g * 64 + at] : in[g % 4 * 64 + at] >> (g < 4 ? 0 : 4) & 15;
      to[b * BLOCK + i] = __builtin_fmaf(float(code - zero_code(m.kind)), scale, least);
    }
  }
}

// --- quantised rows ---------------------------------------------------------------------------------------

// Rows as int8 with their scales; in the precise mode each row is two: its value, and what that value missed.
// What belongs to a block lies side by side for all rows: a tile finds that of its rows behind one pointer.
struct Rows {
  int passes = 1, blocks = 0, lines = 0;
  Buffer<int8_t> codes;   // [lines = rows * passes][blocks * 32]
  Buffer<float> scales;   // [blocks][lines]
  Buffer<float> shares;   // scale * sum of codes
  Buffer<int32_t> minus;  // -8 * sum of codes

  void need(int rows, int cols, int passes_) {
    passes = passes_, blocks = cols / BLOCK, lines = rows * passes;
    codes.need(size_t(lines) * cols);
    const size_t count = size_t(lines) * blocks;
    scales.need(count), shares.need(count), minus.need(count);
  }
};

// `count` blocks of a row, `x` their first number, to blocks first.. of `row`.
static inline void quantise(const float* x, Rows& to, int row, int first, int count) {
  const vf huge = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  for (int b = first; b < first + count; b++, x += BLOCK) {
    vf rest[2] = {load(x), load(x + LANES)};
    float scale = maximum(larger(larger(rest[0], -rest[0]), larger(rest[1], -rest[1]))) / 127.0f;
    for (int pass = 0; pass < to.passes; pass++, scale /= 254.0f) {
      const size_t line = size_t(row) * to.passes + pass, at = size_t(b) * to.lines + line;
      const vf inverse = all(scale > 1e-30f ? 1.0f / scale : 0.0f);
      vf total{};
      for (int h = 0; h < 2; h++) {
        const vf rounded = fma(rest[h], inverse, huge) - huge;
        store_bytes(to.codes.data() + (line * to.blocks + b) * BLOCK + h * LANES, to_int(rounded));
        rest[h] = fma(rounded, all(-scale), rest[h]);
        total = total + rounded;
      }
      const float codes_sum = sum(total);
      to.scales[at] = scale;
      to.shares[at] = scale * codes_sum;
      to.minus[at] = -8 * int32_t(codes_sum);
    }
  }
}

// --- the product of one block: codes of 16 columns with R rows, added to `sums`; exact ---------------------
//
// A row's four inputs are broadcast by the instruction that uses them. In assembly, because the compiler would rather
// keep them for the next columns, and has no registers for that.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

template <int R, bool EIGHT>
static ALWAYS void block_dot(const uint8_t* codes, const int8_t* const* q, int at, vi* sums) {
  const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; g++) {
    __m512i w = _mm512_loadu_si512(codes + (EIGHT ? g : g & 3) * 64);
    if (!EIGHT) w = _mm512_and_si512(g < 4 ? w : _mm512_srli_epi16(w, 4), low);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[r]) : "v"(w), "m"(*(const four*)(q[r] + at + g * 4)));
  }
}

#elif defined(__AVX2__)

// Eight columns. u4 x s8 pairs, summed 8 groups deep in int16: at most 8 * 2 * 15 * 127 = 30,480. Eight bits are two
// planes of four.
template <int R, bool EIGHT>
static ALWAYS void half_dot(const uint8_t* codes, const int8_t* const* q, int at, __m256i* sums) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int plane = EIGHT ? 1 : 0; plane >= 0; plane--) {
    __m256i total[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) total[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
      __m256i w = _mm256_loadu_si256((const __m256i*)(codes + (EIGHT ? g : g & 3) * 64));
      w = _mm256_and_si256((EIGHT ? plane == 0 : g < 4) ? w : _mm256_srli_epi16(w, 4), low);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        __m256i product;
        asm("vpbroadcastd %2, %0\n\tvpmaddubsw %0, %1, %0"
            : "=&x"(product)
            : "x"(w), "m"(*(const four*)(q[r] + at + g * 4)));
        total[r] = _mm256_add_epi16(total[r], product);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      __m256i wide = _mm256_madd_epi16(total[r], ones);
      if (plane) wide = _mm256_slli_epi32(wide, 4);
      sums[r] = _mm256_add_epi32(sums[r], wide);
    }
  }
}

template <int R, bool EIGHT>
static ALWAYS void block_dot(const uint8_t* codes, const int8_t* const* q, int at, vi* sums) {
  __m256i lo[R], hi[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) lo[r] = (__m256i)sums[r].lo, hi[r] = (__m256i)sums[r].hi;
  half_dot<R, EIGHT>(codes, q, at, lo);
  half_dot<R, EIGHT>(codes + 32, q, at, hi);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) sums[r] = {(ireg)lo[r], (ireg)hi[r]};
}

#else

template <int R, bool EIGHT>
static ALWAYS void block_dot(const uint8_t* codes, const int8_t* const* q, int at, vi* sums) {
  for (int r = 0; r < R; r++) {
    int32_t total[LANES];
    std::memcpy(total, &sums[r], sizeof total);
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

// R rows with one panel: out[r] holds 16 columns.
template <int R, Kind KIND>
static __attribute__((noinline)) void tile(const Matrix& m, int panel, const Rows& rows, int row, vf* out) {
  const int blocks = m.blocks;
  const int8_t* q[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) q[r] = rows.codes.data() + size_t(row + r) * blocks * BLOCK;
  const float *scales = rows.scales.data() + row, *shares = rows.shares.data() + row;
  const int32_t* minus = rows.minus.data() + row;
  const uint8_t* at = m.block(panel, 0);
  vf total[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) total[r] = vf{};
  for (int b = 0; b < blocks; b++, at += m.block_bytes, scales += rows.lines, shares += rows.lines, minus += rows.lines) {
    vi sums[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      sums[r] = KIND == Q4_1 ? vi{} : all_int(minus[r]);
      if (KIND == Q8_0) sums[r] = sums[r] << 4;
    }
    block_dot<R, KIND == Q8_0>(at, q, b * BLOCK, sums);
    const half* d = reinterpret_cast<const half*>(at + code_bytes(KIND));
    const vf scale = load_half(d), least = KIND == Q4_1 ? load_half(d + LANES) : vf{};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      total[r] = fma(to_float(sums[r]), scale * all(scales[r]), total[r]);
      if (KIND == Q4_1) total[r] = fma(least, all(shares[r]), total[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) out[r] = total[r];
}

template <int R>
static void tile_of(const Matrix& m, int panel, const Rows& rows, int row, vf* out) {
  switch (m.kind) {
    case Q4_1: return tile<R, Q4_1>(m, panel, rows, row, out);
    case Q4_0: return tile<R, Q4_0>(m, panel, rows, row, out);
    case Q8_0: return tile<R, Q8_0>(m, panel, rows, row, out);
  }
}

// Panels [from, to), two at a time, of the product with `count` rows. `put(panel, row, values)` takes the 16 columns of
// each of the two panels. In the precise mode a row is two: its value and its residual, added here.
template <class Put>
static void product(const Matrix& m, int from, int to, const Rows& rows, int count, const Put& put) {
  const int passes = rows.passes, total = count * passes;
  vf out[2][TILE];
  for (int panel = from; panel < to; panel += 2) {
    for (int row = 0, n; row < total; row += n) {
      const int left = total - row;
      n = left >= TILE ? TILE : left >= 4 ? 4 : left >= 2 ? 2 : 1;
      for (int p = 0; p < 2; p++) {
        if (n == TILE) tile_of<TILE>(m, panel + p, rows, row, out[p]);
        else if (n == 4) tile_of<4>(m, panel + p, rows, row, out[p]);
        else if (n == 2) tile_of<2>(m, panel + p, rows, row, out[p]);
        else tile_of<1>(m, panel + p, rows, row, out[p]);
      }
      for (int r = 0; r < n; r += passes) {
        vf y[2] = {out[0][r], out[1][r]};
        if (passes == 2) y[0] = y[0] + out[0][r + 1], y[1] = y[1] + out[1][r + 1];
        put(panel, (row + r) / passes, y);
      }
    }
  }
}

}  // namespace chorus
