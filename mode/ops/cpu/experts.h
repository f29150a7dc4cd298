// Experts of a CPU: gather, products, activation, gates and the sum of a token's choices, forward and backward.
//
// Each core takes whole experts, the largest that is left. The rows of one expert are gathered, used up and put back
// where they came from while they are in that core's cache; nothing is sorted or copied beforehand. The products are
// torch's own. Knows nothing of autograd.
//
// T tokens of width D, K choices each; an assignment is t * K + k. A choice outside of the E experts (a no-op, or -1)
// is no row of anything, it is idle. R rows: the assignments that are left, by expert and within one by token.

#pragma once

#include <atomic>
#include <cstring>
#include <tuple>
#include <vector>

#include "common.h"

namespace deepspeed_mode {

constexpr double MAX_UNEVENNESS = 1.1;  // the busiest core's rows by the mean; products that cores share lose as much

struct Expert {
  int64_t index, begin, rows;
};

struct Plan {
  std::vector<Expert> experts;       // those that have rows, the largest first
  std::vector<int64_t> assignments;  // of every row; then the idle ones
  int64_t rows;
};

Plan make_plan(const Tensor& choices_TK, int64_t num_experts) {
  const int64_t* choices = choices_TK.const_data_ptr<int64_t>();
  const int64_t num_choices = choices_TK.numel();
  auto group = [&](int64_t a) {  // the idle ones are the last group; without a branch that nobody could foretell
    return uint64_t(choices[a]) < uint64_t(num_experts) ? choices[a] : num_experts;
  };
  std::vector<int64_t> place(num_experts + 2, 0);
  for (int64_t a = 0; a < num_choices; a++) place[group(a) + 1]++;
  std::partial_sum(place.begin(), place.end(), place.begin());
  Plan plan;
  plan.rows = place[num_experts];
  for (int64_t e = 0; e < num_experts; e++)
    if (place[e + 1] > place[e]) plan.experts.push_back({e, place[e], place[e + 1] - place[e]});
  std::stable_sort(plan.experts.begin(), plan.experts.end(),
                   [](const Expert& a, const Expert& b) { return a.rows > b.rows; });
  plan.assignments.resize(num_choices);
  for (int64_t a = 0; a < num_choices; a++) plan.assignments[place[group(a)]++] = a;
  return plan;
}

bool evenly_busy(const Plan& plan, int64_t cores) {
  std::vector<int64_t> rows(cores, 0);
  for (const Expert& expert : plan.experts) *std::min_element(rows.begin(), rows.end()) += expert.rows;
  return *std::max_element(rows.begin(), rows.end()) * cores <= MAX_UNEVENNESS * plan.rows;
}

// Experts side by side or, where that would leave cores idle, one after another; then the cores share each step. After
// them, by whoever is free, `rest` of the idle assignments from `begin` to `end`.
template <class Work, class Rest>
void for_each_expert(const Plan& plan, const Work& work, const Rest& rest) {
  const int64_t cores = at::get_num_threads(), num_experts = plan.experts.size();
  const int64_t at_once = evenly_busy(plan, cores) ? cores : 1, num_assignments = plan.assignments.size();
  std::atomic<int64_t> next{0};
  auto take = [&](int64_t, int64_t) {
    at::AutoDispatchBelowADInplaceOrView without_autograd;  // every thread has a state of its own
    int64_t i;
    while ((i = next++) < num_experts) work(plan.experts[i]);
    for (int64_t begin; (begin = plan.rows + (i - num_experts) * PIECE) < num_assignments; i = next++)
      rest(begin, std::min(begin + PIECE, num_assignments));
  };
  if (at_once == 1) return take(0, 1);
  at::parallel_for(0, at_once, 1, take);
}

// [rows, D]: the tokens of these assignments.
template <class T>
Tensor gather(const Tensor& x_TD, const int64_t* assignments, int64_t rows, int64_t top_k) {
  const int64_t width = x_TD.size(1);
  Tensor out_ND = at::empty({rows, width}, x_TD.options());
  const T* from = x_TD.const_data_ptr<T>();
  T* to = out_ND.mutable_data_ptr<T>();
  for_each_row(rows, [&](int64_t r) {
    std::memcpy(to + r * width, from + assignments[r] / top_k * width, width * sizeof(T));
  });
  return out_ND;
}

template <class T>
void scatter(const Tensor& x_ND, const int64_t* assignments, const Tensor& out_AD) {
  const int64_t width = x_ND.size(1);
  const T* from = x_ND.const_data_ptr<T>();
  T* to = out_AD.mutable_data_ptr<T>();
  for_each_row(x_ND.size(0), [&](int64_t r) {
    std::memcpy(to + assignments[r] * width, from + r * width, width * sizeof(T));
  });
}

// [T, D]: the sum of every token's assignments, in their order; of none, zero. With one choice that is what there is.
template <class T>
Tensor sum_choices(const Tensor& x_AD, const Tensor& choices_TK, int64_t num_experts) {
  const int64_t top_k = choices_TK.size(1), width = x_AD.size(1);
  if (top_k == 1) return x_AD;
  const int64_t* choices = choices_TK.const_data_ptr<int64_t>();
  Tensor out_TD = at::empty({choices_TK.size(0), width}, x_AD.options());
  const T* from = x_AD.const_data_ptr<T>();
  T* to = out_TD.mutable_data_ptr<T>();
  for_each_row(choices_TK.size(0), [&](int64_t t) {
    T* sum = to + t * width;
    bool any = false;
    for (int64_t a = t * top_k; a < (t + 1) * top_k; a++) {
      if (choices[a] < 0 || choices[a] >= num_experts) continue;
      const T* row = from + a * width;
      if (any)
        for (int64_t i = 0; i < width; i++) sum[i] += row[i];
      else
        std::memcpy(sum, row, width * sizeof(T));
      any = true;
    }
    if (!any) std::memset(sum, 0, width * sizeof(T));
  });
  return out_TD;
}

// Zero for idle assignments, if they are what `sum_choices` returns; else nobody reads them.
template <class T>
void clear_idle(const Plan& plan, int64_t begin, int64_t end, int64_t top_k, const Tensor& out_AD) {
  if (top_k > 1) return;
  const int64_t width = out_AD.size(1);
  T* to = out_AD.mutable_data_ptr<T>();
  for_each_row(end - begin, [&](int64_t i) {
    std::memset(to + plan.assignments[begin + i] * width, 0, width * sizeof(T));
  });
}

// hidden = weight * silu(gate) * up, of one row.
template <class T>
void activate(const T* gate, const T* up, T weight, T* hidden, int64_t width) {
  using V = at::vec::Vectorized<T>;
  for (int64_t i = 0; i < width; i += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), width - i);
    const V g = V::loadu(gate + i, n);
    (V(weight) * g * sigmoid<T>(g) * V::loadu(up + i, n)).store(hidden + i, n);
  }
}

// From the gradient of a row of `hidden` to those of gate (in its place), up and, returned, weight.
template <class T>
T activate_backward(const T* gate, const T* up, T weight, T* grad, T* grad_up, int64_t width) {
  using V = at::vec::Vectorized<T>;
  V grad_weight(0);
  for (int64_t i = 0; i < width; i += V::size()) {
    const int64_t n = std::min<int64_t>(V::size(), width - i);
    const V g = V::loadu(gate + i, n), u = V::loadu(up + i, n), d = V::loadu(grad + i, n);  // zeros beyond n
    const V s = sigmoid<T>(g), silu = g * s, weighted = d * V(weight);
    grad_weight = grad_weight + d * silu * u;
    (weighted * silu).store(grad_up + i, n);
    (weighted * u * (s + silu * (V(1) - s))).store(grad + i, n);
  }
  return sum_of<T>(grad_weight);
}

// (mixed_TD, gate_RF, up_RF): the sum of every token's gated experts; the projections, for backward.
template <class T>
std::tuple<Tensor, Tensor, Tensor> mix(const Tensor& x_TD, const Tensor& choices_TK, const Tensor& gates_TK,
                                       const Tensor& w1_EFD, const Tensor& w2_EDF, const Tensor& w3_EFD) {
  const int64_t num_experts = w1_EFD.size(0), hidden_width = w1_EFD.size(1), top_k = choices_TK.size(1);
  const Plan plan = make_plan(choices_TK, num_experts);
  Tensor gate_RF = at::empty({plan.rows, hidden_width}, x_TD.options());
  Tensor up_RF = at::empty_like(gate_RF), out_AD = at::empty({choices_TK.numel(), x_TD.size(1)}, x_TD.options());
  const T* gates = gates_TK.const_data_ptr<T>();
  auto compute = [&](const Expert& expert) {
    const int64_t* assignments = plan.assignments.data() + expert.begin;
    Tensor x_ND = gather<T>(x_TD, assignments, expert.rows, top_k);
    Tensor gate_NF = gate_RF.narrow(0, expert.begin, expert.rows), up_NF = up_RF.narrow(0, expert.begin, expert.rows);
    at::mm_out(gate_NF, x_ND, w1_EFD[expert.index].t());
    at::mm_out(up_NF, x_ND, w3_EFD[expert.index].t());
    Tensor hidden_NF = at::empty_like(gate_NF);
    const T *gate = gate_NF.const_data_ptr<T>(), *up = up_NF.const_data_ptr<T>();
    T* hidden = hidden_NF.mutable_data_ptr<T>();
    for_each_row(expert.rows, [&](int64_t r) {
      const int64_t at = r * hidden_width;
      activate<T>(gate + at, up + at, gates[assignments[r]], hidden + at, hidden_width);
    });
    at::mm_out(x_ND, hidden_NF, w2_EDF[expert.index].t());  // its memory: it is used up
    scatter<T>(x_ND, assignments, out_AD);
  };
  auto clear = [&](int64_t begin, int64_t end) { clear_idle<T>(plan, begin, end, top_k, out_AD); };
  for_each_expert(plan, compute, clear);
  return {sum_choices<T>(out_AD, choices_TK, num_experts), gate_RF, up_RF};
}

// The gradients of x, gates, w1, w2, w3.
template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mix_backward(const Tensor& grad_TD, const Tensor& x_TD,
                                                                const Tensor& choices_TK, const Tensor& gates_TK,
                                                                const Tensor& gate_RF, const Tensor& up_RF,
                                                                const Tensor& w1_EFD, const Tensor& w2_EDF,
                                                                const Tensor& w3_EFD) {
  const int64_t num_experts = w1_EFD.size(0), hidden_width = w1_EFD.size(1), top_k = choices_TK.size(1);
  const Plan plan = make_plan(choices_TK, num_experts);
  Tensor grad_w1 = at::empty_like(w1_EFD), grad_w2 = at::empty_like(w2_EDF), grad_w3 = at::empty_like(w3_EFD);
  if (int64_t(plan.experts.size()) < num_experts)  // an expert without rows has no gradient
    for (Tensor& grad : {std::ref(grad_w1), std::ref(grad_w2), std::ref(grad_w3)}) grad.zero_();
  Tensor grad_gates_TK = at::zeros_like(gates_TK);
  Tensor grad_x_AD = at::empty({choices_TK.numel(), x_TD.size(1)}, x_TD.options());
  const T* gates = gates_TK.const_data_ptr<T>();
  T* grad_gates = grad_gates_TK.mutable_data_ptr<T>();
  auto compute = [&](const Expert& expert) {
    const int64_t* assignments = plan.assignments.data() + expert.begin;
    Tensor x_ND = gather<T>(x_TD, assignments, expert.rows, top_k);
    Tensor grad_ND = gather<T>(grad_TD, assignments, expert.rows, top_k);
    Tensor hidden_NF = at::empty({expert.rows, hidden_width}, x_TD.options()), grad_up_NF = at::empty_like(hidden_NF);
    const T* gate = gate_RF.const_data_ptr<T>() + expert.begin * hidden_width;
    const T* up = up_RF.const_data_ptr<T>() + expert.begin * hidden_width;
    T *hidden = hidden_NF.mutable_data_ptr<T>(), *grad_up = grad_up_NF.mutable_data_ptr<T>();
    for_each_row(expert.rows, [&](int64_t r) {
      const int64_t at = r * hidden_width;
      activate<T>(gate + at, up + at, gates[assignments[r]], hidden + at, hidden_width);
    });
    Tensor w1_grad = grad_w1[expert.index], w2_grad = grad_w2[expert.index], w3_grad = grad_w3[expert.index];
    at::mm_out(w2_grad, grad_ND.t(), hidden_NF);
    at::mm_out(hidden_NF, grad_ND, w2_EDF[expert.index]);  // used up: its gradient takes its memory
    for_each_row(expert.rows, [&](int64_t r) {
      const int64_t at = r * hidden_width, a = assignments[r];
      grad_gates[a] = activate_backward<T>(gate + at, up + at, gates[a], hidden + at, grad_up + at, hidden_width);
    });
    at::mm_out(w1_grad, hidden_NF.t(), x_ND);
    at::mm_out(w3_grad, grad_up_NF.t(), x_ND);
    at::mm_out(grad_ND, hidden_NF, w1_EFD[expert.index]);
    at::addmm_out(grad_ND, grad_ND, grad_up_NF, w3_EFD[expert.index]);
    scatter<T>(grad_ND, assignments, grad_x_AD);
  };
  auto clear = [&](int64_t begin, int64_t end) { clear_idle<T>(plan, begin, end, top_k, grad_x_AD); };
  for_each_expert(plan, compute, clear);
  Tensor grad_x_TD = sum_choices<T>(grad_x_AD, choices_TK, num_experts);
  return {grad_x_TD, grad_gates_TK, grad_w1, grad_w2, grad_w3};
}

}  // namespace deepspeed_mode
