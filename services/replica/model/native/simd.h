// Sixteen lanes everywhere: one register of AVX-512, two of AVX2, four of SSE2 or Neon.
//
// Every processor does the same float operations in the same order per lane (multiplications and additions are fused
// where it says `fma` and nowhere else), and dot products of codes are exact: the bits of a result do not depend on
// the instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace chorus {

#define ALWAYS inline __attribute__((always_inline))

constexpr int LANES = 16;
typedef uint16_t half;

// --- one register -----------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float quad __attribute__((vector_size(16)));
typedef float reg __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ireg __attribute__((vector_size(WIDTH * 4)));
typedef int16_t sreg __attribute__((vector_size(WIDTH * 4)));
typedef int8_t breg __attribute__((vector_size(WIDTH * 2), aligned(1)));
typedef float reg_anywhere __attribute__((vector_size(WIDTH * 4), aligned(4)));

static ALWAYS reg fma(reg a, reg b, reg c) {
#if defined(__AVX512F__)
  return (reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  reg r;
  for (int i = 0; i < WIDTH; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

static ALWAYS reg larger(reg a, reg b) { return a > b ? a : b; }
static ALWAYS ireg to_int(reg a) { return __builtin_convertvector(a, ireg); }
static ALWAYS reg to_float(ireg a) { return __builtin_convertvector(a, reg); }
static ALWAYS reg choose(ireg mask, reg a, reg b) { return mask ? a : b; }
static ALWAYS ireg choose(ireg mask, ireg a, ireg b) { return mask ? a : b; }
static ALWAYS reg as_float(ireg a) { return (reg)a; }

// --- sixteen lanes as a tree of registers -----------------------------------------------------------------

template <class T>
struct Pair {
  T lo, hi;
};

#define CHORUS_BINARY(op) \
  template <class T> static ALWAYS Pair<T> operator op(Pair<T> a, Pair<T> b) { return {a.lo op b.lo, a.hi op b.hi}; }
CHORUS_BINARY(+)
CHORUS_BINARY(-)
CHORUS_BINARY(*)
CHORUS_BINARY(/)
#undef CHORUS_BINARY
template <class T> static ALWAYS Pair<T> operator-(Pair<T> a) { return {-a.lo, -a.hi}; }
template <class T> static ALWAYS Pair<T> operator<<(Pair<T> a, int by) { return {a.lo << by, a.hi << by}; }
template <class T> static ALWAYS auto operator>(Pair<T> a, Pair<T> b) {
  return Pair<decltype(a.lo > b.lo)>{a.lo > b.lo, a.hi > b.hi};
}
template <class T> static ALWAYS Pair<T> fma(Pair<T> a, Pair<T> b, Pair<T> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <class T> static ALWAYS Pair<T> larger(Pair<T> a, Pair<T> b) { return {larger(a.lo, b.lo), larger(a.hi, b.hi)}; }
template <class M, class T> static ALWAYS Pair<T> choose(Pair<M> mask, Pair<T> a, Pair<T> b) {
  return {choose(mask.lo, a.lo, b.lo), choose(mask.hi, a.hi, b.hi)};
}
template <class T> static ALWAYS auto to_int(Pair<T> a) { return Pair<decltype(to_int(a.lo))>{to_int(a.lo), to_int(a.hi)}; }
template <class T> static ALWAYS auto to_float(Pair<T> a) {
  return Pair<decltype(to_float(a.lo))>{to_float(a.lo), to_float(a.hi)};
}
template <class T> static ALWAYS auto as_float(Pair<T> a) {
  return Pair<decltype(as_float(a.lo))>{as_float(a.lo), as_float(a.hi)};
}

#if defined(__AVX512F__)
typedef reg vf;
typedef ireg vi;
typedef sreg vs;
#elif defined(__AVX2__)
typedef Pair<reg> vf;
typedef Pair<ireg> vi;
typedef Pair<sreg> vs;
#else
typedef Pair<Pair<reg>> vf;
typedef Pair<Pair<ireg>> vi;
typedef Pair<Pair<sreg>> vs;
#endif
static_assert(sizeof(vf) == LANES * 4 && sizeof(vi) == LANES * 4 && sizeof(vs) == LANES * 4);

// --- memory -----------------------------------------------------------------------------------------------

static ALWAYS void put(reg* to, float x) {
#if defined(__AVX512F__)
  *to = (reg)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  *to = (reg)_mm256_set1_ps(x);
#else
  for (int i = 0; i < WIDTH; i++) (*to)[i] = x;
#endif
}
static ALWAYS void put(ireg* to, int32_t x) { *to = ireg{} + x; }
template <class T, class X> static ALWAYS void put(Pair<T>* to, X x) { put(&to->lo, x), put(&to->hi, x); }
static ALWAYS vf all(float x) {
  vf v;
  put(&v, x);
  return v;
}
static ALWAYS vi all_int(int32_t x) {
  vi v;
  put(&v, x);
  return v;
}

static ALWAYS void load_to(reg* to, const float* p) { *to = *reinterpret_cast<const reg_anywhere*>(p); }
template <class T> static ALWAYS void load_to(Pair<T>* to, const float* p) {
  load_to(&to->lo, p), load_to(&to->hi, p + sizeof(T) / 4);
}
static ALWAYS vf load(const float* p) {
  vf v;
  load_to(&v, p);
  return v;
}
static ALWAYS void store(float* p, reg v) { *reinterpret_cast<reg_anywhere*>(p) = v; }
template <class T> static ALWAYS void store(float* p, Pair<T> v) { store(p, v.lo), store(p + sizeof(T) / 4, v.hi); }

static ALWAYS vf lanes() {
  const float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
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
  return {(reg)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          (reg)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#else
  float f[LANES];
  for (int i = 0; i < LANES; i++) f[i] = half_to_float(p[i]);
  return load(f);
#endif
}

static ALWAYS void store_half(half* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph((__m256)v.hi, _MM_FROUND_TO_NEAREST_INT));
#else
  float f[LANES];
  store(f, v);
  for (int i = 0; i < LANES; i++) p[i] = float_to_half(f[i]);
#endif
}

// bfloat16: the upper half of a float, rounded to nearest even.
static ALWAYS vf load_bfloat(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return {(reg)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16),
          (reg)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))), 16)};
#else
  uint32_t bits[LANES];
  for (int i = 0; i < LANES; i++) bits[i] = uint32_t(p[i]) << 16;
  vf v;
  std::memcpy(&v, bits, sizeof v);
  return v;
#endif
}

static ALWAYS void store_bfloat(uint16_t* p, vf v) {
  uint32_t bits[LANES];
  std::memcpy(bits, &v, sizeof bits);
  for (int i = 0; i < LANES; i++) p[i] = uint16_t((bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16);
}

static ALWAYS vf load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return {(reg)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          (reg)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
#else
  float f[LANES];
  for (int i = 0; i < LANES; i++) f[i] = p[i];
  return load(f);
#endif
}

// Sixteen numbers of -127..127 as bytes.
static ALWAYS void store_bytes(int8_t* p, vi v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.lo, (__m256i)v.hi), 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
#else
  int32_t n[LANES];
  std::memcpy(n, &v, sizeof n);
  for (int i = 0; i < LANES; i++) p[i] = int8_t(n[i]);
#endif
}

// Sixteen numbers of -32767..32767 as shorts.
static ALWAYS void store_shorts(int16_t* p, vi v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.lo, (__m256i)v.hi), 0xD8));
#else
  int32_t n[LANES];
  std::memcpy(n, &v, sizeof n);
  for (int i = 0; i < LANES; i++) p[i] = int16_t(n[i]);
#endif
}

// --- two bytes in each lane, and their exact products with two shorts --------------------------------------

static ALWAYS void load_to(sreg* to, const int8_t* p) {
#if defined(__AVX512BW__)
  *to = (sreg)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  *to = (sreg)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  *to = __builtin_convertvector(*reinterpret_cast<const breg*>(p), sreg);
#endif
}
template <class T> static ALWAYS void load_to(Pair<T>* to, const int8_t* p) {
  load_to(&to->lo, p), load_to(&to->hi, p + sizeof(T) / 2);
}
static ALWAYS vs load_pairs(const int8_t* p) {
  vs v;
  load_to(&v, p);
  return v;
}

typedef int32_t __attribute__((may_alias, aligned(1))) four;  // bytes, read as one number

// Lane i of `sum` grows by pairs[2 i] * two[0] + pairs[2 i + 1] * two[1].

static ALWAYS void add_dots(ireg& sum, sreg pairs, const int16_t* two) {
#if defined(__AVX512VNNI__)
  sum = (ireg)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_set1_epi32(*(const four*)two));
#elif defined(__AVX2__)
  sum += (ireg)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(*(const four*)two));
#else
  for (int i = 0; i < WIDTH; i++) sum[i] += pairs[2 * i] * two[0] + pairs[2 * i + 1] * two[1];
#endif
}
template <class T, class S> static ALWAYS void add_dots(Pair<T>& sum, Pair<S> pairs, const int16_t* two) {
  add_dots(sum.lo, pairs.lo, two), add_dots(sum.hi, pairs.hi, two);
}

// --- over the lanes: always the same tree, lane i with i + 8, then + 4, + 2, + 1 -----------------------------

struct Add {
  template <class T> static ALWAYS T of(T a, T b) { return a + b; }
};
struct Larger {
  template <class T> static ALWAYS T of(T a, T b) { return a > b ? a : b; }
};

template <class Op> static ALWAYS float reduce(quad v) {
  return Op::template of<float>(Op::template of<float>(v[0], v[2]), Op::template of<float>(v[1], v[3]));
}
#if defined(__AVX2__)
typedef float octet __attribute__((vector_size(32)));
template <class Op> static ALWAYS float reduce(octet v) {
  return reduce<Op>(Op::of(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7)));
}
#endif
#if defined(__AVX512F__)
template <class Op> static ALWAYS float reduce(reg v) {
  return reduce<Op>(Op::of(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)));
}
#endif
template <class Op, class T> static ALWAYS float reduce(Pair<Pair<T>> v) {
  return reduce<Op>(Pair<T>{Op::of(v.lo.lo, v.hi.lo), Op::of(v.lo.hi, v.hi.hi)});
}
template <class Op> static ALWAYS float reduce(Pair<reg> v) { return reduce<Op>(Op::of(v.lo, v.hi)); }

static ALWAYS float sum(vf v) { return reduce<Add>(v); }
static ALWAYS float maximum(vf v) { return reduce<Larger>(v); }

// --- lanes i and i ^ S change places, S a power of two -----------------------------------------------------

#if defined(__AVX512F__)
template <int S> static ALWAYS reg swapped(reg v) {
  if (S == 8) return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  if (S == 4) return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  if (S == 2) return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}
#elif defined(__AVX2__)
template <int S> static ALWAYS reg swapped(reg v) {
  if (S == 4) return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  if (S == 2) return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
}
#else
template <int S> static ALWAYS reg swapped(reg v) {
  if (S == 2) return __builtin_shufflevector(v, v, 2, 3, 0, 1);
  return __builtin_shufflevector(v, v, 1, 0, 3, 2);
}
#endif
template <int S, class T> static ALWAYS Pair<T> swapped(Pair<T> v) {
  if constexpr (S * sizeof(float) == sizeof(T)) return {v.hi, v.lo};
  else return {swapped<S>(v.lo), swapped<S>(v.hi)};
}

// --- functions --------------------------------------------------------------------------------------------

// e^x for x <= 88, relative error below 2e-7; 0 far below. Above it is nonsense: callers see to it.
static ALWAYS vf exponential(vf x) {
  const vf huge = all(12582912.0f);  // 1.5 * 2^23: adding it leaves a whole number
  x = larger(x, all(-87.0f));
  const vf n = fma(x, all(1.44269504f), huge) - huge;
  vf r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  vf p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  return p * as_float((to_int(n) + all_int(127)) << 23);
}

}  // namespace chorus
