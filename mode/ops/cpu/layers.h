// What lies between the products of a block, each in one pass over its rows: torch takes five or more.

#pragma once

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/cpu/vec/functional.h>

#include "common.h"

namespace deepspeed_mode {

// ---- RMSNorm: weight * x / sqrt(mean(x^2) + eps) ----

// (normed, 1 / sqrt(mean(x^2) + eps) of every row).
template <class T>
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps) {
  using V = at::vec::Vectorized<T>;
  const int64_t rows = x_TD.size(0), width = x_TD.size(1);
  Tensor out_TD = at::empty_like(x_TD), scale_T = at::empty({rows}, x_TD.options());
  const T *all = x_TD.const_data_ptr<T>(), *weight = weight_D.const_data_ptr<T>();
  T *to = out_TD.mutable_data_ptr<T>(), *scales = scale_T.mutable_data_ptr<T>();
  for_each_row(rows, [&](int64_t r) {
    const T* x = all + r * width;
    V squares(0);
    for (int64_t i = 0; i < width; i += V::size()) {
      const V v = V::loadu(x + i, std::min<int64_t>(V::size(), width - i));  // zeros beyond
      squares = at::vec::fmadd(v, v, squares);
    }
    scales[r] = T(1) / std::sqrt(sum_of<T>(squares) / T(width) + T(eps));
    for (int64_t i = 0; i < width; i += V::size()) {
      const int64_t n = std::min<int64_t>(V::size(), width - i);
      (V::loadu(x + i, n) * V(scales[r]) * V::loadu(weight + i, n)).store(to + r * width + i, n);
    }
  });
  return {out_TD, scale_T};
}

// The gradients of x and weight.
template <class T>
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_TD, const Tensor& x_TD, const Tensor& weight_D,
                                             const Tensor& scale_T) {
  using V = at::vec::Vectorized<T>;
  const int64_t width = x_TD.size(1);
  Tensor grad_x_TD = at::empty_like(x_TD);
  const T *grads = grad_TD.const_data_ptr<T>(), *all = x_TD.const_data_ptr<T>();
  const T *weight = weight_D.const_data_ptr<T>(), *scales = scale_T.const_data_ptr<T>();
  T* to = grad_x_TD.mutable_data_ptr<T>();
  Tensor grad_weight_D = sum_over_rows<T>(x_TD.size(0), width, x_TD.options(), [&](int64_t r, T* grad_weight) {
    const T *grad = grads + r * width, *x = all + r * width;
    const V scale(scales[r]);
    V products(0);
    for (int64_t i = 0; i < width; i += V::size()) {
      const int64_t n = std::min<int64_t>(V::size(), width - i);
      const V g = V::loadu(grad + i, n), normed = V::loadu(x + i, n) * scale;
      products = at::vec::fmadd(g * V::loadu(weight + i, n), normed, products);
      at::vec::fmadd(g, normed, V::loadu(grad_weight + i, n)).store(grad_weight + i, n);
    }
    const V mean(sum_of<T>(products) / T(width));
    for (int64_t i = 0; i < width; i += V::size()) {
      const int64_t n = std::min<int64_t>(V::size(), width - i);
      const V normed = V::loadu(x + i, n) * scale, weighted = V::loadu(grad + i, n) * V::loadu(weight + i, n);
      ((weighted - normed * mean) * scale).store(to + r * width + i, n);
    }
  });
  return {grad_x_TD, grad_weight_D};
}

// ---- Rotary positions ----

// Turns each pair (i, i + half) of one head by its token's angle, or back.
template <class T>
void turn(const T* x, const T* cos, const T* sin, T sign, T* out, int64_t half) {
  using V = at::vec::Vectorized<T>;
  for (int64_t i = 0; i < half; i += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), half - i);
    const V first = V::loadu(x + i, n), second = V::loadu(x + half + i, n);
    const V cosine = V::loadu(cos + i, n), sine = V::loadu(sin + i, n) * V(sign);
    (first * cosine - second * sine).store(out + i, n);
    (second * cosine + first * sine).store(out + half + i, n);
  }
}

// [B, S, numbers] or [B, S, heads, numbers]. Only the numbers must lie side by side.
template <class T>
struct Grid {
  const T* data;
  int64_t row, token, head;

  explicit Grid(const Tensor& x)
      : data(x.const_data_ptr<T>()), row(x.stride(0)), token(x.stride(1)), head(x.dim() == 4 ? x.stride(2) : 0) {}

  const T* at(int64_t b, int64_t s, int64_t n = 0) const { return data + b * row + s * token + n * head; }
};

template <class T>
Tensor rotate(const Tensor& x_BSNH, const Tensor& cos_BSH, const Tensor& sin_BSH) {
  const int64_t slots = x_BSNH.size(1), heads = x_BSNH.size(2), width = x_BSNH.size(3);
  Tensor out_BSNH = at::empty(x_BSNH.sizes(), x_BSNH.options());
  const Grid<T> x(x_BSNH), cos(cos_BSH), sin(sin_BSH);
  T* to = out_BSNH.mutable_data_ptr<T>();
  for_each_row(x_BSNH.size(0) * slots, [&](int64_t t) {
    const int64_t b = t / slots, s = t % slots;
    for (int64_t n = 0; n < heads; n++)
      turn<T>(x.at(b, s, n), cos.at(b, s), sin.at(b, s), 1, to + (t * heads + n) * width, width / 2);
  });
  return out_BSNH;
}

// The gradient of all heads, [B, S, N + G + G, H], from those of turned queries, turned keys and values.
template <class T>
Tensor rotate_backward(const Tensor& grad_q_BSNH, const Tensor& grad_k_BSGH, const Tensor& grad_v_BSGH,
                       const Tensor& cos_BSH, const Tensor& sin_BSH) {
  const int64_t rows = grad_q_BSNH.size(0), slots = grad_q_BSNH.size(1), width = grad_q_BSNH.size(3);
  const int64_t num_q = grad_q_BSNH.size(2), num_k = grad_k_BSGH.size(2), heads = num_q + 2 * num_k;
  Tensor out_BSNH = at::empty({rows, slots, heads, width}, grad_q_BSNH.options());
  const Grid<T> q(grad_q_BSNH), k(grad_k_BSGH), v(grad_v_BSGH), cos(cos_BSH), sin(sin_BSH);
  T* to = out_BSNH.mutable_data_ptr<T>();
  for_each_row(rows * slots, [&](int64_t t) {
    const int64_t b = t / slots, s = t % slots;
    T* out = to + t * heads * width;
    for (int64_t n = 0; n < num_q; n++, out += width)
      turn<T>(q.at(b, s, n), cos.at(b, s), sin.at(b, s), -1, out, width / 2);
    for (int64_t n = 0; n < num_k; n++, out += width)
      turn<T>(k.at(b, s, n), cos.at(b, s), sin.at(b, s), -1, out, width / 2);
    for (int64_t n = 0; n < num_k; n++, out += width) std::copy_n(v.at(b, s, n), width, out);
  });
  return out_BSNH;
}

// ---- An expert router ----

// (logits_TJ, scores_TJ, choices_TK, gates_TK): x weight^T; their softmax; the K columns with the largest logits, plus
// `bias_J` if there is one, best first, of equals the lower one; the scores of those.
template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor> route(const Tensor& x_TD, const Tensor& weight_JD,
                                                 const std::optional<Tensor>& bias_J, int64_t top_k) {
  using V = at::vec::Vectorized<T>;
  const int64_t tokens = x_TD.size(0), columns = weight_JD.size(0);
  Tensor logits_TJ = at::empty({tokens, columns}, x_TD.options()), scores_TJ = at::empty_like(logits_TJ);
  Tensor gates_TK = at::empty({tokens, top_k}, x_TD.options());
  Tensor choices_TK = at::empty({tokens, top_k}, x_TD.options().dtype(at::kLong));
  const std::vector<T> no_bias(columns, T(0));
  const T* bias = bias_J ? bias_J->const_data_ptr<T>() : no_bias.data();
  const T* all_logits = logits_TJ.const_data_ptr<T>();
  T *all_scores = scores_TJ.mutable_data_ptr<T>(), *gates = gates_TK.mutable_data_ptr<T>();
  int64_t* choices = choices_TK.mutable_data_ptr<int64_t>();
  auto choose = [&](int64_t t) {
    const T* logits = all_logits + t * columns;
    T* scores = all_scores + t * columns;
    const V largest(*std::max_element(logits, logits + columns));
    for (int64_t j = 0; j < columns; j += V::size()) {
      const int64_t n = std::min<int64_t>(V::size(), columns - j);
      (V::loadu(logits + j, n) - largest).exp().store(scores + j, n);
    }
    const T share = T(1) / std::accumulate(scores, scores + columns, T(0));
    for (int64_t j = 0; j < columns; j++) scores[j] *= share;
    int64_t* chosen = choices + t * top_k;
    for (int64_t k = 0; k < top_k; k++) {
      int64_t best = -1;
      for (int64_t j = 0; j < columns; j++) {
        const bool is_new = k == 0 || std::find(chosen, chosen + k, j) == chosen + k;
        best = is_new && (best < 0 || logits[j] + bias[j] > logits[best] + bias[best]) ? j : best;
      }
      chosen[k] = best;
      gates[t * top_k + k] = scores[best];
    }
  };
  at::parallel_for(0, (tokens + PIECE - 1) / PIECE, 1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView without_autograd;  // every thread has a state of its own
    for (int64_t first = begin * PIECE; first < std::min(tokens, end * PIECE); first += PIECE) {
      const int64_t rows = std::min(PIECE, tokens - first);
      Tensor logits_NJ = logits_TJ.narrow(0, first, rows);
      at::mm_out(logits_NJ, x_TD.narrow(0, first, rows), weight_JD.t());
      for (int64_t t = first; t < first + rows; t++) choose(t);
    }
  });
  return {logits_TJ, scores_TJ, choices_TK, gates_TK};
}

// The gradients of x and of weight, from those of the gates and, if there are any, of scores and logits.
template <class T>
std::tuple<Tensor, Tensor> route_backward(const Tensor& grad_gates_TK,
                                          const std::optional<Tensor>& grad_scores_TJ,
                                          const std::optional<Tensor>& grad_logits_TJ, const Tensor& x_TD,
                                          const Tensor& weight_JD, const Tensor& scores_TJ, const Tensor& choices_TK) {
  const int64_t tokens = x_TD.size(0), columns = weight_JD.size(0), top_k = choices_TK.size(1);
  const int64_t cores = std::clamp<int64_t>(tokens / PIECE, 1, at::get_num_threads());
  Tensor grad_x_TD = at::empty_like(x_TD), grad_weight_CJD = at::zeros({cores, columns, x_TD.size(1)}, x_TD.options());
  const T* grad_scores = grad_scores_TJ ? grad_scores_TJ->const_data_ptr<T>() : nullptr;
  const T* grad_logits = grad_logits_TJ ? grad_logits_TJ->const_data_ptr<T>() : nullptr;
  const T *grad_gates = grad_gates_TK.const_data_ptr<T>(), *all_scores = scores_TJ.const_data_ptr<T>();
  const int64_t* choices = choices_TK.const_data_ptr<int64_t>();
  auto to_logits = [&](int64_t t, T* grad) {
    const T* scores = all_scores + t * columns;
    for (int64_t j = 0; j < columns; j++) grad[j] = grad_scores ? grad_scores[t * columns + j] : T(0);
    for (int64_t a = t * top_k; a < (t + 1) * top_k; a++) grad[choices[a]] += grad_gates[a];
    const T mean = std::inner_product(grad, grad + columns, scores, T(0));
    for (int64_t j = 0; j < columns; j++)
      grad[j] = (grad[j] - mean) * scores[j] + (grad_logits ? grad_logits[t * columns + j] : T(0));
  };
  at::parallel_for(0, cores, 1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    Tensor grad_PJ = at::empty({PIECE, columns}, x_TD.options());
    for (int64_t c = begin; c < end; c++) {
      Tensor grad_weight_JD = grad_weight_CJD[c];
      const int64_t last = tokens * (c + 1) / cores;
      for (int64_t first = tokens * c / cores; first < last; first += PIECE) {
        const int64_t rows = std::min(PIECE, last - first);
        Tensor grad_NJ = grad_PJ.narrow(0, 0, rows), grad_x_ND = grad_x_TD.narrow(0, first, rows);
        T* grad = grad_NJ.mutable_data_ptr<T>();
        for (int64_t r = 0; r < rows; r++) to_logits(first + r, grad + r * columns);
        at::addmm_out(grad_weight_JD, grad_weight_JD, grad_NJ.t(), x_TD.narrow(0, first, rows));
        at::mm_out(grad_x_ND, grad_NJ, weight_JD);
      }
    }
  });
  return {grad_x_TD, grad_weight_CJD.sum(0)};
}

// ---- The score of a depth router: x . weight ----

// The gradients of x and of weight.
template <class T>
std::tuple<Tensor, Tensor> score_backward(const Tensor& grad_score_T, const Tensor& x_TD, const Tensor& weight_D) {
  using V = at::vec::Vectorized<T>;
  const int64_t width = x_TD.size(1);
  Tensor grad_x_TD = at::empty_like(x_TD);
  const T* grad_scores = grad_score_T.const_data_ptr<T>();
  const T *all = x_TD.const_data_ptr<T>(), *weight = weight_D.const_data_ptr<T>();
  T* to = grad_x_TD.mutable_data_ptr<T>();
  Tensor grad_weight_D = sum_over_rows<T>(x_TD.size(0), width, x_TD.options(), [&](int64_t r, T* grad_weight) {
    const T* x = all + r * width;
    const V by(grad_scores[r]);
    for (int64_t i = 0; i < width; i += V::size()) {
      const int64_t n = std::min<int64_t>(V::size(), width - i);
      (by * V::loadu(weight + i, n)).store(to + r * width + i, n);
      at::vec::fmadd(by, V::loadu(x + i, n), V::loadu(grad_weight + i, n)).store(grad_weight + i, n);
    }
  });
  return {grad_x_TD, grad_weight_D};
}

// ---- Cross-entropy ----

// (the loss of every row; its largest logit; the logarithm of the sum of the exponentials of all logits less that one).
// The last two stay apart: their sum would be rounded where logits are large. A row whose target is `ignored` has no
// loss.
template <class T>
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits_TV, const Tensor& targets_T, int64_t ignored) {
  using V = at::vec::Vectorized<T>;
  const int64_t rows = logits_TV.size(0), width = logits_TV.size(1);
  Tensor losses_T = at::empty({rows}, logits_TV.options());
  Tensor largest_T = at::empty_like(losses_T), log_sums_T = at::empty_like(losses_T);
  const T* all = logits_TV.const_data_ptr<T>();
  const int64_t* targets = targets_T.const_data_ptr<int64_t>();
  T *losses = losses_T.mutable_data_ptr<T>(), *all_largest = largest_T.mutable_data_ptr<T>();
  T* log_sums = log_sums_T.mutable_data_ptr<T>();
  for_each_row(rows, [&](int64_t r) {
    const T* logits = all + r * width;
    const int64_t target = targets[r];
    const bool is_token = target >= 0 && target < width;
    TORCH_CHECK_INDEX(is_token || target == ignored, "label ", target, " is no token: there are ", width);
    const T largest = at::vec::reduce_all<T>([](V& a, V& b) { return at::vec::maximum(a, b); }, logits, width);
    V sums(0);
    for (int64_t i = 0; i < width; i += V::size()) {
      const int64_t n = std::min<int64_t>(V::size(), width - i);
      sums = V::set(sums, sums + (V::loadu(logits + i, n) - V(largest)).exp(), n);
    }
    all_largest[r] = largest;
    log_sums[r] = std::log(sum_of<T>(sums));
    losses[r] = target == ignored ? T(0) : (largest - logits[target]) + log_sums[r];
  });
  return {losses_T, largest_T, log_sums_T};
}

template <class T>
Tensor cross_entropy_backward(const Tensor& grad_T, const Tensor& logits_TV, const Tensor& targets_T,
                              const Tensor& largest_T, const Tensor& log_sums_T, int64_t ignored) {
  using V = at::vec::Vectorized<T>;
  const int64_t rows = logits_TV.size(0), width = logits_TV.size(1);
  Tensor grad_logits_TV = at::empty_like(logits_TV);
  const T *all = logits_TV.const_data_ptr<T>(), *grads = grad_T.const_data_ptr<T>();
  const T *largest = largest_T.const_data_ptr<T>(), *log_sums = log_sums_T.const_data_ptr<T>();
  const int64_t* targets = targets_T.const_data_ptr<int64_t>();
  T* to = grad_logits_TV.mutable_data_ptr<T>();
  for_each_row(rows, [&](int64_t r) {
    T* out = to + r * width;
    if (targets[r] == ignored) return void(std::fill(out, out + width, T(0)));
    for (int64_t i = 0; i < width; i += V::size()) {
      const int64_t n = std::min<int64_t>(V::size(), width - i);
      const V share = (V::loadu(all + r * width + i, n) - V(largest[r]) - V(log_sums[r])).exp();
      (V(grads[r]) * share).store(out + i, n);
    }
    out[targets[r]] -= grads[r];
  });
  return grad_logits_TV;
}

}  // namespace deepspeed_mode
