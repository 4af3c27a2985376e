// Attention of one query a sequence over its pages, by online softmax.
//
// A page is [Hkv, 2, page_tokens, D] contiguous, k before v. Only the tokens of the context are
// read: what lies beyond them belongs to nobody.
#include <algorithm>

#include "gemm.h"
#include "vec.h"

namespace {

constexpr int64_t kTokens = 32;  // tokens that are weighed at once

struct Paged {
  int64_t dtype, kv_dtype;
  const void *q, *kv;
  const int32_t *page_table, *context_lens;
  void* out;
  int64_t q_token, q_head, page_stride, table_stride;
  int64_t num_heads, num_kv_heads, page_tokens, head_dim, window;  // window 0: all is seen
  float scale;
};

thread_local Scratch scratch;

// `count` keys or values from element `from` of the pages on, in fp32 rows padded to `width`.
void read_rows(const Paged& a, int64_t from, int64_t count, int64_t width, float* to) {
  if (width == a.head_dim) {
    read_floats(a.kv_dtype, a.kv, from, count * width, to);
    return;
  }
  for (int64_t i = 0; i < count; i++)
    read_floats(a.kv_dtype, a.kv, from + i * a.head_dim, a.head_dim, to + i * width);
}

void fetch(const Paged& a, int64_t from, int64_t count) {
  int64_t element_nbytes = a.kv_dtype == kFloat32 ? 4 : 2;
  const char* first = (const char*)a.kv + from * element_nbytes;
  for (int64_t i = 0; i < count * a.head_dim * element_nbytes; i += 64)
    __builtin_prefetch(first + i, 0, 2);
}

// Dot products of one query with up to kTokens keys, in fp32. V: vectors of a head, 0 for any.
template <int V>
INLINE void score(const float* q, const float* keys, int64_t any_width, int64_t count,
                  float* scores) {
  const int64_t width = V ? V * kLanes : any_width;
  for (int64_t first = 0; first < count; first += kLanes) {
    // Keys beyond the count are whatever the scratch holds; their lanes are cut below.
    f32x16 products[kLanes];
    for (int64_t i = 0; i < kLanes; i++) {
      const float* key = keys + (first + i) * width;
      f32x16 even = splat(0.0f), odd = splat(0.0f);
#pragma GCC unroll 8
      for (int64_t d = 0; d + 2 * kLanes <= width; d += 2 * kLanes) {
        even += load(q + d) * load(key + d);
        odd += load(q + d + kLanes) * load(key + d + kLanes);
      }
      if (width / kLanes % 2) even += load(q + width - kLanes) * load(key + width - kLanes);
      products[i] = even + odd;
    }
    store(scores + first, sum_rows(products));
  }
  for (int64_t i = count; i < round_up(count, kLanes); i++) scores[i] = -INFINITY;
}

// What one thread needs for the query heads of one K/V head.
struct Work {
  float *q, *acc;         // [heads, width]: scaled queries; values summed with their weights
  float *top, *total;     // [heads]: largest score so far; sum of exp(score - top)
  float* weights;         // [heads, kTokens]
  float* tokens;          // [kTokens, width] keys, then values

  static int64_t numel(int64_t heads, int64_t width) {
    return heads * (2 * width + 2 + kTokens) + kTokens * width + kLanes;
  }

  Work(float* base, int64_t heads, int64_t width) {
    q = base;
    acc = q + heads * width;
    weights = acc + heads * width;
    tokens = weights + heads * kTokens;
    top = tokens + kTokens * width;
    total = top + heads;
  }
};

// One step of the online softmax: scores to weights, and the earlier sums shrunk to the new top.
INLINE void weigh(float* weights, int64_t count, float* acc, int64_t width, float* top,
                  float* total) {
  f32x16 highest = splat(*top), sums = splat(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    f32x16 scores = load(weights + i);
    highest = scores > highest ? scores : highest;
  }
  float new_top = largest(highest);
  // While nothing but -inf was seen, exp(-inf - -inf) would be NaN.
  float base = new_top == -INFINITY ? 0.0f : new_top;
  for (int64_t i = 0; i < count; i += kLanes) {
    f32x16 weight = exp16(load(weights + i) - base);
    store(weights + i, weight);
    sums += weight;
  }
  if (*top != new_top) {
    float shrink = expf(*top - base);
    *total *= shrink;
    for (int64_t d = 0; d < width; d += kLanes) store(acc + d, load(acc + d) * shrink);
    *top = new_top;
  }
  *total += sum(sums);
}

// All query heads of one K/V head of one row over its context.
void attend(const Paged& a, int64_t row, int64_t kv_head, const Work& work) {
  int64_t heads = a.num_heads / a.num_kv_heads, width = round_up(a.head_dim, kLanes);
  int64_t context = a.context_lens[row];
  int64_t seen_from = a.window ? std::max<int64_t>(0, context - a.window) : 0;
  for (int64_t h = 0; h < heads; h++) {
    work.top[h] = -INFINITY;
    work.total[h] = 0.0f;
  }
  std::memset(work.acc, 0, heads * width * sizeof(float));
  const int32_t* table = a.page_table + row * a.table_stride;
  auto keys_at = [&](int64_t t) {
    return table[t / a.page_tokens] * a.page_stride +
           (kv_head * 2 * a.page_tokens + t % a.page_tokens) * a.head_dim;
  };
  auto count_at = [&](int64_t t) {
    return std::min(std::min(kTokens, a.page_tokens - t % a.page_tokens), context - t);
  };
  for (int64_t t = seen_from, count; t < context; t += count) {
    count = count_at(t);
    int64_t k = keys_at(t), v = k + a.page_tokens * a.head_dim;
    // Keys and values alternate in runs too short for the hardware to see two streams.
    fetch(a, v, count);
    read_rows(a, k, count, width, work.tokens);
    if (t + count < context) fetch(a, keys_at(t + count), count_at(t + count));
    for (int64_t h = 0; h < heads; h++) {
      const float* q = work.q + h * width;
      float* scores = work.weights + h * kTokens;
      switch (width) {
        case 64: score<4>(q, work.tokens, width, count, scores); break;
        case 128: score<8>(q, work.tokens, width, count, scores); break;
        default: score<0>(q, work.tokens, width, count, scores); break;
      }
      weigh(scores, count, work.acc + h * width, width, work.top + h, work.total + h);
    }
    read_rows(a, v, count, width, work.tokens);
    for (int64_t h = 0; h < heads; h += kTileRows) {
      int64_t rows = std::min(kTileRows, heads - h), columns;
      for (int64_t d = 0; d < width; d += columns) {
        columns = width - d >= 64 ? 64 : width - d >= 32 ? 32 : 16;
        float* acc = work.acc + h * width + d;
        with_tile(rows, columns, [&](auto tile) __attribute__((always_inline)) {
          tile.from_scaled(acc, width, 1.0f);
          tile.add(work.weights + h * kTokens, kTokens, 1, work.tokens + d, width, count);
          tile.to(acc, width);
        });
      }
    }
  }
}

}  // namespace

// out [num_rows, num_heads, head_dim] contiguous.
TANDEM_API void tandem_attention_decode(int64_t dtype, int64_t kv_dtype, const void* q,
                                        const void* kv, const int32_t* page_table,
                                        const int32_t* context_lens, void* out, int64_t q_token,
                                        int64_t q_head, int64_t page_stride, int64_t table_stride,
                                        int64_t num_heads, int64_t num_kv_heads,
                                        int64_t page_tokens, int64_t head_dim, float scale,
                                        int64_t num_rows, int64_t window) {
  Paged a{dtype,        kv_dtype,  q,            kv,          page_table, context_lens,
          out,          q_token,   q_head,       page_stride, table_stride, num_heads,
          num_kv_heads, page_tokens, head_dim,   window,      scale};
  int64_t heads = num_heads / num_kv_heads, width = round_up(head_dim, kLanes);
#pragma omp parallel
  {
    int64_t nbytes = Work::numel(heads, width) * sizeof(float);
    Work work((float*)scratch.reserve(nbytes), heads, width);
    std::memset(work.q, 0, nbytes);  // scratch that is read before it is written must be finite
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t row = 0; row < num_rows; row++) {
      for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
        for (int64_t h = 0; h < heads; h++) {
          int64_t from = row * q_token + (kv_head * heads + h) * q_head;
          read_floats(dtype, q, from, head_dim, work.q + h * width);
          for (int64_t d = 0; d < width; d++) work.q[h * width + d] *= scale;
        }
        attend(a, row, kv_head, work);
        for (int64_t h = 0; h < heads; h++) {
          float* values = work.acc + h * width;
          for (int64_t d = 0; d < head_dim; d++) values[d] /= work.total[h];
          int64_t to = (row * num_heads + kv_head * heads + h) * head_dim;
          write_floats(dtype, out, to, head_dim, values);
        }
      }
    }
  }
}

// K/V of packed tokens into their pages; k and v are [T, Hkv, D] with strided tokens and heads.
TANDEM_API void tandem_write_kv(int64_t element_nbytes, const char* k, const char* v, char* kv,
                                const int64_t* token_pages, const int64_t* token_offsets,
                                int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head,
                                int64_t page_stride, int64_t num_tokens, int64_t num_kv_heads,
                                int64_t page_tokens, int64_t head_dim) {
  int64_t nbytes = head_dim * element_nbytes, plane = page_tokens * nbytes;
#pragma omp parallel for schedule(static) if (num_tokens * num_kv_heads * nbytes > (1 << 17))
  for (int64_t t = 0; t < num_tokens; t++) {
    char* page = kv + token_pages[t] * page_stride * element_nbytes + token_offsets[t] * nbytes;
    for (int64_t head = 0; head < num_kv_heads; head++) {
      char* to = page + 2 * head * plane;
      std::memcpy(to, k + (t * k_token + head * k_head) * element_nbytes, nbytes);
      std::memcpy(to + plane, v + (t * v_token + head * v_head) * element_nbytes, nbytes);
    }
  }
}
