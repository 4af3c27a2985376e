// Sixteen fp32 lanes over the dtypes of tensors: load, store, exp, silu, sums.
//
// Written with the compiler's vector extension, so that every x86-64 CPU runs the same source; the
// few places where AVX-512 has an instruction of its own are marked by its macro. Arithmetic is
// fp32 throughout, and fp32 -> bf16 rounds to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define TANDEM_API extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Codes of dtypes as library.py passes them.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int64_t kLanes = 16;

INLINE int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

INLINE f32x16 splat(float value) { return value - (f32x16){}; }

// ---- scalars ----

INLINE float to_float(float value) { return value; }

INLINE float to_float(bf16 value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

INLINE float to_float(f16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  uint32_t sign = (uint32_t)(value.bits & 0x8000) << 16, exponent = (value.bits >> 10) & 31;
  uint32_t mantissa = value.bits & 0x3ff;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
  uint32_t bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

INLINE void from_float(float value, float* out) { *out = value; }

INLINE void from_float(float value, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  // A NaN whose payload lies in the lower half would round to infinity.
  out->bits = value != value ? (uint16_t)((bits >> 16) | 0x40)
                             : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void from_float(float value, f16* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(value, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    out->bits = (uint16_t)(sign | 0x7e00);
  } else if (rest >= 0x477ff000) {  // rounds to 65536 or more
    out->bits = (uint16_t)(sign | 0x7c00);
  } else if (rest < 0x38800000) {  // subnormal in fp16: the addition rounds at the right bit
    float magnitude;
    std::memcpy(&magnitude, &rest, 4);
    magnitude += 0.5f;
    uint32_t sum;
    std::memcpy(&sum, &magnitude, 4);
    out->bits = (uint16_t)(sign | (sum - 0x3f000000));
  } else {
    rest += 0xfff + ((rest >> 13) & 1) - (112u << 23);
    out->bits = (uint16_t)(sign | (rest >> 13));
  }
#endif
}

INLINE float load_scalar(const void* base, int64_t dtype, int64_t index) {
  if (dtype == kFloat32) return ((const float*)base)[index];
  if (dtype == kBFloat16) return to_float(((const bf16*)base)[index]);
  return to_float(((const f16*)base)[index]);
}

// ---- vectors ----

INLINE f32x16 load(const float* from) {
  f32x16 out;
  std::memcpy(&out, from, 64);
  return out;
}

INLINE f32x16 load(const bf16* from) {
  u16x16 half;
  std::memcpy(&half, from, 32);
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

INLINE f32x16 load(const f16* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  f32x16 out;
  for (int i = 0; i < 16; i++) out[i] = to_float(from[i]);
  return out;
#endif
}

INLINE void store(float* to, f32x16 value) { std::memcpy(to, &value, 64); }

INLINE void store(bf16* to, f32x16 value) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &half, 32);
#else
  u32x16 bits = (u32x16)value;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 is_nan = (u32x16)(value != value);
  rounded = (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan);
  u16x16 half = __builtin_convertvector(rounded, u16x16);
  std::memcpy(to, &half, 32);
#endif
}

INLINE void store(f16* to, f32x16 value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)value, 0));
#else
  for (int i = 0; i < 16; i++) from_float(value[i], to + i);
#endif
}

// The first `count` of sixteen elements; the other lanes read as zero and are not written.
template <typename T>
INLINE f32x16 load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[16];
  std::memset(lanes, 0, sizeof(lanes));
  std::memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

template <typename T>
INLINE void store_some(T* to, f32x16 value, int64_t count) {
  if (count >= kLanes) {
    store(to, value);
    return;
  }
  T lanes[16];
  store(lanes, value);
  std::memcpy(to, lanes, count * sizeof(T));
}

INLINE float sum(f32x16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[16];
  std::memcpy(lanes, &value, 64);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

// The largest lane; NaN where lanes are NaN is not promised.
INLINE float largest(f32x16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float out = value[0];
  for (int i = 1; i < 16; i++) out = value[i] > out ? value[i] : out;
  return out;
#endif
}

// Lane i of the result is the sum of rows[i]: a tree of pairwise additions, where each step halves
// the lanes that a row still has.
INLINE f32x16 sum_rows(const f32x16* rows) {
  const i32x16 low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const i32x16 low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  const i32x16 low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const i32x16 low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  f32x16 t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    t[i] = __builtin_shuffle(rows[i], rows[i + 8], low8) +
           __builtin_shuffle(rows[i], rows[i + 8], low8 + 8);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    t[i] = __builtin_shuffle(t[i], t[i + 4], low4) + __builtin_shuffle(t[i], t[i + 4], low4 + 4);
  for (int i = 0; i < 2; i++)
    t[i] = __builtin_shuffle(t[i], t[i + 2], low2) + __builtin_shuffle(t[i], t[i + 2], low2 + 2);
  return __builtin_shuffle(t[0], t[1], low1) + __builtin_shuffle(t[0], t[1], low1 + 1);
}

// exp to about 2 ulp; 0 below -87.3, infinity above 88.7, NaN stays NaN.
INLINE f32x16 exp16(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 clamped = x > 88.8f ? splat(88.8f) : x;
  f32x16 n = (clamped * 1.44269504088896f + magic) - magic;
  f32x16 r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // n reaches 128 at the top, one more than an exponent holds: half of it is applied twice.
  i32x16 power = __builtin_convertvector(n, i32x16);
  i32x16 low = power >> 1, high = power - low;
  f32x16 out = p * (f32x16)((low + 127) << 23) * (f32x16)((high + 127) << 23);
  out = x < -87.3f ? splat(0.0f) : out;
  return x > 88.7228f ? splat(INFINITY) : out;
}

INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp16(-x)); }

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// log(1 + exp(x)) = max(x, 0) + log(1 + u), u = exp(-|x|); log(1 + u) / u by the polynomial that
// interpolates it at Chebyshev's points of [0, 1], to 2e-7. NaN stays NaN.
INLINE f32x16 softplus16(f32x16 x) {
  f32x16 u = exp16(x > 0.0f ? -x : x);
  f32x16 p = splat(0.0051261018961668015f);
  p = p * u - 0.029074065387248993f;
  p = p * u + 0.0775160863995552f;
  p = p * u - 0.13602247834205627f;
  p = p * u + 0.19076880812644958f;
  p = p * u - 0.2483539879322052f;
  p = p * u + 0.3331812024116516f;
  p = p * u - 0.4999944567680359f;
  p = p * u + 0.9999999403953552f;
  return (x > 0.0f ? x : splat(0.0f)) + u * p;
}

// ---- memory ----

// Scratch of one thread: grows, is aligned to 64 bytes, and lives as long as the thread.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  void* reserve(int64_t nbytes) {
    if (nbytes > nbytes_) {
      std::free(data_);
      nbytes_ = round_up(nbytes, 4096);
      data_ = std::aligned_alloc(64, nbytes_);
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t nbytes_ = 0;
};

// Runs `call` with a value of the C++ type of a dtype code.
template <typename F>
INLINE void with_dtype(int64_t dtype, F&& call) {
  if (dtype == kFloat32) {
    call(float{});
  } else if (dtype == kBFloat16) {
    call(bf16{});
  } else {
    call(f16{});
  }
}

// `count` values from element `index` of a tensor on, as fp32; `to` is filled with zeros up to a
// whole vector.
[[maybe_unused]] static void read_floats(int64_t dtype, const void* base, int64_t index, int64_t count, float* to) {
  with_dtype(dtype, [&](auto value) {
    auto from = (const decltype(value)*)base + index;
    for (int64_t i = 0; i < count; i += kLanes) store(to + i, load_some(from + i, count - i));
  });
}

[[maybe_unused]] static void write_floats(int64_t dtype, void* base, int64_t index, int64_t count,
                                          const float* from) {
  with_dtype(dtype, [&](auto value) {
    auto to = (decltype(value)*)base + index;
    for (int64_t i = 0; i < count; i += kLanes) store_some(to + i, load(from + i), count - i);
  });
}
