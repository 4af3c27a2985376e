// Depthwise causal convolution over packed sequences; each sequence's window, its last W - 1 raw
// inputs, oldest first, lies in a slot and is updated in place.
//
// The channels of x are covered in order by up to kMaxWindows windows, [C_i, W - 1] contiguous
// within a slot. Values and windows have one dtype.
#include <algorithm>

#include "vec.h"

namespace {

constexpr int64_t kMaxWindows = 8;
constexpr int64_t kMaxTaps = 8;
constexpr int64_t kBlock = 128;  // channels that one task takes over a whole sequence

// What a task needs of the convolution, per block of up to kBlock channels, tap after tap.
struct Taps {
  alignas(64) float weight[kMaxTaps][kBlock];
  alignas(64) float bias[kBlock];
};

// [count, width] of any dtype to rows[width][count], in fp32. F: the width, 0 for any. A width that
// is known lets the compiler transpose in registers.
template <int F, typename T>
INLINE void unpack(const T* from, int64_t any_width, int64_t count, float (*rows)[kBlock]) {
  const int64_t width = F ? F : any_width;
  alignas(64) float flat[kBlock * kMaxTaps];
  for (int64_t i = 0; i < count * width; i += kLanes)
    store(flat + i, load_some(from + i, count * width - i));
  for (int64_t c = 0; c < count; c++)
    for (int64_t w = 0; w < width; w++) rows[w][c] = flat[c * width + w];
}

template <int F, typename T>
INLINE void pack(const float (*rows)[kBlock], int64_t any_width, int64_t count, T* to) {
  const int64_t width = F ? F : any_width;
  alignas(64) float flat[kBlock * kMaxTaps];
  for (int64_t c = 0; c < count; c++)
    for (int64_t w = 0; w < width; w++) flat[c * width + w] = rows[w][c];
  for (int64_t i = 0; i < count * width; i += kLanes)
    store_some(to + i, load(flat + i), count * width - i);
}

template <int W, typename T>
INLINE void read_taps(const T* weight, const T* bias, int64_t num_taps, int64_t count,
                      Taps& taps) {
  unpack<W>(weight, num_taps, count, taps.weight);
  for (int64_t c = 0; c < count; c += kLanes)
    store(taps.bias + c, bias ? load_some(bias + c, count - c) : splat(0.0f));
}

// One block of channels within one window of one sequence. W: taps, 0 for any number.
template <int W, typename T>
void convolve(const T* x, int64_t x_stride, T* y, int64_t y_stride, const Taps& taps, T* window,
              int64_t num_tokens, int64_t count, int64_t any_taps, bool has_state, bool is_silu) {
  const int64_t num_taps = W ? W : any_taps, history = num_taps - 1;
  // Inputs before the chunk, then, where the chunk is short, after it: one row a position.
  alignas(64) float past[2 * kMaxTaps][kBlock];
  unpack<W ? W - 1 : 0>(window, history, count, past);
  if (!has_state) std::memset(past, 0, history * sizeof(past[0]));
  auto input = [&](int64_t t, int64_t c) __attribute__((always_inline)) {
    return t < 0 ? load(past[t + history] + c) : load_some(x + t * x_stride + c, count - c);
  };
  auto output = [&](int64_t t, int64_t c) __attribute__((always_inline)) {
    f32x16 total = load(taps.bias + c);
#pragma GCC unroll 8
    for (int64_t w = 0; w < num_taps; w++)
      total += input(t - history + w, c) * load(taps.weight[w] + c);
    store_some(y + t * y_stride + c, is_silu ? silu(total) : total, count - c);
  };
  int64_t lead = std::min(history, num_tokens);
  for (int64_t t = 0; t < lead; t++)
    for (int64_t c = 0; c < count; c += kLanes) output(t, c);
  for (int64_t t = lead; t < num_tokens; t++)
    for (int64_t c = 0; c < count; c += kLanes) output(t, c);
  for (int64_t w = 0; w < history; w++)
    for (int64_t c = 0; c < count; c += kLanes)
      store(past[kMaxTaps + w] + c, input(num_tokens - history + w, c));
  pack<W ? W - 1 : 0>(past + kMaxTaps, history, count, window);
}

// Arguments: 64 bits each, in the order of the array in conv1d/cpu.py. The windows follow them,
// three numbers each: address in slot 0, elements from slot to slot, channels.
struct Conv {
  int64_t dtype, weight_dtype;
  const void *x, *weight, *bias;  // bias may be null
  void* y;
  const int64_t* slots;
  const int32_t* query_start;  // null: one token a row
  const bool* has_state;       // null: all rows
  int64_t x_stride, num_rows, num_channels, num_taps, is_silu, num_windows;
};

template <int W, typename T>
void run(const Conv& a, const int64_t* windows) {
  int64_t blocks_before[kMaxWindows + 1] = {0}, channels_before[kMaxWindows + 1] = {0};
  for (int64_t i = 0; i < a.num_windows; i++) {
    int64_t channels = windows[3 * i + 2];
    blocks_before[i + 1] = blocks_before[i] + (channels + kBlock - 1) / kBlock;
    channels_before[i + 1] = channels_before[i] + channels;
  }
  int64_t blocks = blocks_before[a.num_windows];
  int64_t num_tokens = a.query_start ? a.query_start[a.num_rows] : a.num_rows;
#pragma omp parallel for schedule(dynamic) if (num_tokens * a.num_channels > 8192)
  for (int64_t block = 0; block < blocks; block++) {
    int64_t i = 0;
    while (block >= blocks_before[i + 1]) i++;
    int64_t inside = (block - blocks_before[i]) * kBlock, channel = channels_before[i] + inside;
    int64_t count = std::min(kBlock, windows[3 * i + 2] - inside);
    Taps taps;
    with_dtype(a.weight_dtype, [&](auto value) {
      using U = decltype(value);
      read_taps<W>((const U*)a.weight + channel * a.num_taps,
                   a.bias ? (const U*)a.bias + channel : nullptr, a.num_taps, count, taps);
    });
    for (int64_t row = 0; row < a.num_rows; row++) {
      int64_t first = a.query_start ? a.query_start[row] : row;
      int64_t last = a.query_start ? a.query_start[row + 1] : row + 1;
      if (first == last) continue;
      T* window = (T*)windows[3 * i] + a.slots[row] * windows[3 * i + 1] +
                  inside * (a.num_taps - 1);
      convolve<W>((const T*)a.x + first * a.x_stride + channel, a.x_stride,
                  (T*)a.y + first * a.num_channels + channel, a.num_channels, taps, window,
                  last - first, count, a.num_taps, a.has_state ? a.has_state[row] : true,
                  a.is_silu);
    }
  }
}

}  // namespace

// Rows are tokens query_start[row] to query_start[row + 1] of x; without query_start one token
// each. Without has_state every window is live. y is contiguous.
TANDEM_API void tandem_conv1d(const int64_t* fields) {
  Conv a;
  std::memcpy((void*)&a, fields, sizeof(Conv));
  const int64_t* windows = fields + sizeof(Conv) / sizeof(int64_t);
  with_dtype(a.dtype, [&](auto value) {
    using T = decltype(value);
    if (a.num_taps == 4) {
      run<4, T>(a, windows);
    } else {
      run<0, T>(a, windows);
    }
  });
}
