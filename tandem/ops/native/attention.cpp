// Attention of one query a sequence over its pages, by online softmax.
//
// A page is [Hkv, 2, page_tokens, D] contiguous, k before v. Only the tokens of the context are
// read: what lies beyond them belongs to nobody.
#include <omp.h>

#include <algorithm>

#include "vec.h"

namespace {

constexpr int64_t kMaxHeadVectors = 16;  // head_dim up to 256
constexpr int64_t kTokens = 16;          // scores that are exponentiated at once

struct Paged {
  int64_t dtype, kv_dtype;
  const void *q, *kv;
  const int32_t *page_table, *context_lens;
  void* out;
  int64_t q_token, q_head, page_stride, table_stride;
  int64_t num_heads, num_kv_heads, page_tokens, head_dim;
  float scale;
};

thread_local Scratch scratch;

// All query heads of one K/V head of one row, over tokens [first, last) of the context. Leaves
// sums weighted by exp(score - top) and their total.
template <typename T>
void attend(const Paged& a, int64_t row, int64_t kv_head, int64_t first, int64_t last, float* q,
            float* acc, float* top, float* total) {
  int64_t heads = a.num_heads / a.num_kv_heads, width = round_up(a.head_dim, kLanes);
  for (int64_t h = 0; h < heads; h++) {
    top[h] = -INFINITY;
    total[h] = 0.0f;
  }
  std::memset(acc, 0, heads * width * sizeof(float));
  int64_t plane = a.page_tokens * a.head_dim;
  const int32_t* table = a.page_table + row * a.table_stride;
  for (int64_t t = first; t < last;) {
    int64_t offset = t % a.page_tokens;
    int64_t count = std::min(std::min(kTokens, a.page_tokens - offset), last - t);
    const T* k = (const T*)a.kv + (int64_t)table[t / a.page_tokens] * a.page_stride +
                 kv_head * 2 * plane + offset * a.head_dim;
    const T* v = k + plane;
    for (int64_t h = 0; h < heads; h++) {
      float scores[kTokens];
      for (int64_t i = 0; i < count; i++) {
        f32x16 products = splat(0.0f);
        for (int64_t d = 0; d < a.head_dim; d += kLanes)
          products += load(q + h * width + d) * load_some(k + i * a.head_dim + d, a.head_dim - d);
        scores[i] = sum(products);
      }
      float highest = top[h];
      for (int64_t i = 0; i < count; i++) highest = scores[i] > highest ? scores[i] : highest;
      for (int64_t i = count; i < kTokens; i++) scores[i] = -INFINITY;
      // Nothing but -inf so far: exp(-inf - -inf) would be NaN.
      float base = highest == -INFINITY ? 0.0f : highest;
      f32x16 weights = exp16(load(scores) - base);
      float shrink = expf(top[h] - base);
      total[h] = total[h] * shrink + sum(weights);
      top[h] = highest;
      for (int64_t d = 0; d < a.head_dim; d += kLanes) {
        f32x16 value = load(acc + h * width + d) * shrink;
        for (int64_t i = 0; i < count; i++)
          value += weights[i] * load_some(v + i * a.head_dim + d, a.head_dim - d);
        store(acc + h * width + d, value);
      }
    }
    t += count;
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
                                        int64_t num_rows) {
  Paged a{dtype,  kv_dtype,     q,         kv,           page_table,  context_lens, out,  q_token,
          q_head, page_stride,  table_stride, num_heads, num_kv_heads, page_tokens, head_dim, scale};
  int64_t heads = num_heads / num_kv_heads, width = round_up(head_dim, kLanes);
#pragma omp parallel
  {
    float* queries = (float*)scratch.reserve((2 * width + 2) * heads * sizeof(float));
    float *acc = queries + heads * width, *top = acc + heads * width, *total = top + heads;
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t row = 0; row < num_rows; row++) {
      for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
        for (int64_t h = 0; h < heads; h++) {
          int64_t from = row * q_token + (kv_head * heads + h) * q_head;
          read_floats(dtype, q, from, head_dim, queries + h * width);
          for (int64_t d = 0; d < width; d++) queries[h * width + d] *= scale;
        }
        with_dtype(kv_dtype, [&](auto value) {
          attend<decltype(value)>(a, row, kv_head, 0, context_lens[row], queries, acc, top, total);
        });
        for (int64_t h = 0; h < heads; h++) {
          for (int64_t d = 0; d < head_dim; d++) acc[h * width + d] /= total[h];
          write_floats(dtype, out, (row * num_heads + kv_head * heads + h) * head_dim, head_dim,
                       acc + h * width);
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
