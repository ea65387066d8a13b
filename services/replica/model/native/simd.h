// Sixteen lanes everywhere: one zmm, two ymm, or whatever the compiler makes of a 64-byte vector.
// Every processor does the same operations in the same order per lane; only dot products of codes differ by instruction.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace chorus {

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64), aligned(64)));
typedef float vf_u __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(64)));
typedef uint16_t half;

#define ALWAYS inline __attribute__((always_inline))

static ALWAYS vf load(const float* p) { return *reinterpret_cast<const vf_u*>(p); }
static ALWAYS void store(float* p, vf v) { *reinterpret_cast<vf_u*>(p) = v; }
static ALWAYS vf all(float x) { return vf{} + x; }
static ALWAYS vf larger(vf a, vf b) { return a > b ? a : b; }

static ALWAYS vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { vf v; __m256 h[2]; } x{a}, y{b}, z{c};
  z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
  z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
  return z.v;
#else
  vf r;
  for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

// IEEE half <-> float, round to nearest even.
static inline float half_to_float(half h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, rest = h & 1023, bits;
  if (exponent == 31) bits = sign | 0x7f800000 | rest << 13;
  else if (exponent) bits = sign | (exponent + 112) << 23 | rest << 13;
  else {
    float small = float(rest) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

static inline half float_to_half(float f) {
#if defined(__F16C__)
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x47800000) return half(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (magnitude < 0x38800000) {  // below the smallest normal half: let the float unit round
    float scaled, unit = 0.5f;
    std::memcpy(&scaled, &magnitude, 4);
    scaled += unit;
    std::memcpy(&magnitude, &scaled, 4);
    return half(sign | (magnitude - 0x3f000000));
  }
  return half(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
#endif
}

static ALWAYS vf load_half(const half* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  union { vf v; __m256 h[2]; } x;
  x.h[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
  x.h[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)));
  return x.v;
#else
  vf r;
  for (int i = 0; i < LANES; i++) r[i] = half_to_float(p[i]);
  return r;
#endif
}

// The lanes' sum and maximum, always in the same tree.
static ALWAYS float sum(vf v) {
  float t[LANES];
  store(t, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) t[i] += t[i + width];
  return t[0];
}

static ALWAYS float maximum(vf v) {
  float best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// e^x for x <= 88, relative error below 2e-7; 0 far below.
static ALWAYS vf exponential(vf x) {
  const vf low = all(-87.0f);
  x = x < low ? low : x;
  vf n = fma(x, all(1.44269504f), all(12582912.0f)) - all(12582912.0f);  // rounded by the float unit
  vf r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  vf p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  vf scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

}  // namespace chorus
