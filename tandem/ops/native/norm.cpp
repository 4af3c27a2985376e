// Root-mean-square norms and the activations of MLPs: rows in, rows out, fp32 between.
#include <algorithm>

#include "vec.h"

namespace {

// Below this many values a second thread costs more than it saves.
constexpr int64_t kParallelValues = 1 << 15;

template <typename T>
float sum_of_squares(const T* x, int64_t count) {
  f32x16 total = splat(0.0f), second = splat(0.0f);
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    f32x16 a = load(x + i), b = load(x + i + kLanes);
    total += a * a;
    second += b * b;
  }
  for (; i < count; i += kLanes) {
    f32x16 a = load_some(x + i, count - i);
    total += a * a;
  }
  return sum(total + second);
}

template <typename T>
void normalize(const T* x, const float* weight, float inverse, T* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    f32x16 scaled = load_some(x + i, count - i) * inverse * load_some(weight + i, count - i);
    store_some(out + i, scaled, count - i);
  }
}

thread_local Scratch weight_scratch;

// The weight in fp32, itself or converted.
const float* read_weight(int64_t dtype, const void* weight, int64_t count) {
  if (dtype == kFloat32) return (const float*)weight;
  float* out = (float*)weight_scratch.reserve(round_up(count, kLanes) * sizeof(float));
  read_floats(dtype, weight, 0, count, out);
  return out;
}

float inverse_rms(float squares, int64_t count, float eps) {
  return 1.0f / sqrtf(squares / (float)count + eps);
}

}  // namespace

// out = x / rms(x) * weight; rows of x and `residual` are strided, results contiguous. With a
// residual, `total` = x + residual is stored, rounded, and is what is normed.
TANDEM_API void tandem_rms_norm(int64_t dtype, int64_t weight_dtype, const void* x,
                                int64_t x_stride, const void* residual, int64_t residual_stride,
                                void* total, const void* stored_weight, void* out,
                                int64_t num_rows, int64_t num_channels, float eps) {
  const float* weight = read_weight(weight_dtype, stored_weight, num_channels);
  with_dtype(dtype, [&](auto value) {
    using T = decltype(value);
#pragma omp parallel for schedule(static) if (num_rows * num_channels > kParallelValues)
    for (int64_t row = 0; row < num_rows; row++) {
      const T* from = (const T*)x + row * x_stride;
      if (residual) {
        const T* other = (const T*)residual + row * residual_stride;
        T* added = (T*)total + row * num_channels;
        for (int64_t i = 0; i < num_channels; i += kLanes) {
          int64_t count = num_channels - i;
          store_some(added + i, load_some(from + i, count) + load_some(other + i, count), count);
        }
        from = added;
      }
      float inverse = inverse_rms(sum_of_squares(from, num_channels), num_channels, eps);
      normalize(from, weight, inverse, (T*)out + row * num_channels, num_channels);
    }
  });
}

// Norm within groups of y * silu(gate), times weight.
TANDEM_API void tandem_gated_rms_norm(int64_t dtype, int64_t weight_dtype, const void* y,
                                      int64_t y_stride, const void* gate, int64_t gate_stride,
                                      const void* stored_weight, void* out, int64_t num_rows,
                                      int64_t num_channels, int64_t group_size, float eps) {
  const float* weight = read_weight(weight_dtype, stored_weight, num_channels);
  with_dtype(dtype, [&](auto value) {
    using T = decltype(value);
#pragma omp parallel if (num_rows * num_channels > kParallelValues / 4)
    {
      thread_local Scratch scratch;
      float* gated = (float*)scratch.reserve(round_up(group_size, kLanes) * 4);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t first = 0; first < num_channels; first += group_size) {
          const T* from = (const T*)y + row * y_stride + first;
          const T* by = (const T*)gate + row * gate_stride + first;
          T* to = (T*)out + row * num_channels + first;
          for (int64_t i = 0; i < group_size; i += kLanes) {
            int64_t count = group_size - i;
            store(gated + i, load_some(from + i, count) * silu(load_some(by + i, count)));
          }
          float inverse = inverse_rms(sum_of_squares(gated, group_size), group_size, eps);
          for (int64_t i = 0; i < group_size; i += kLanes) {
            int64_t count = group_size - i;
            f32x16 scale = load_some(weight + first + i, count) * inverse;
            store_some(to + i, load(gated + i) * scale, count);
          }
        }
      }
    }
  });
}

// silu(gate) * up of rows [gate | up].
TANDEM_API void tandem_silu_mul(int64_t dtype, const void* gate_up, int64_t stride, void* out,
                                int64_t num_rows, int64_t num_channels) {
  with_dtype(dtype, [&](auto value) {
    using T = decltype(value);
#pragma omp parallel for schedule(static) if (num_rows * num_channels > kParallelValues / 4)
    for (int64_t row = 0; row < num_rows; row++) {
      const T *gate = (const T*)gate_up + row * stride, *up = gate + num_channels;
      T* to = (T*)out + row * num_channels;
      for (int64_t i = 0; i < num_channels; i += kLanes) {
        int64_t count = num_channels - i;
        store_some(to + i, silu(load_some(gate + i, count)) * load_some(up + i, count), count);
      }
    }
  });
}

// max(x, 0)^2 of contiguous values. NaN stays NaN.
TANDEM_API void tandem_relu2(int64_t dtype, const void* x, void* out, int64_t count) {
  with_dtype(dtype, [&](auto value) {
    using T = decltype(value);
#pragma omp parallel for schedule(static) if (count > kParallelValues)
    for (int64_t i = 0; i < count; i += kLanes) {
      f32x16 from = load_some((const T*)x + i, count - i);
      f32x16 kept = from < 0.0f ? splat(0.0f) : from;
      store_some((T*)out + i, kept * kept, count - i);
    }
  });
}
