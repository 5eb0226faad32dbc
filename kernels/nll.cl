/* Negative log likelihood of one class per position.

       loss[n, l] = -weight[t] x[n, t, l],  t = target[n, l];   0 where t == ignore_index
       grad_x[n, c, l] = -grad weight[c] where c == target[n, l] and t is not ignored, else 0

       x, grad_x [N, C, L]; target [N, L]; weight [C]; losses [2, N, L]: the losses, then the weights that were used

   nll_forward    an item per (l, n); losses and weights are summed elsewhere (reduce.cl)
   nll_backward   an item per element of grad_x (l, c, n), or (c, n, -) with PER_CLASS, for L = 1: items lie along what
                  is adjacent in memory

   Assumed: dense tensors. A target outside 0..C-1 that is not ignored is reported as a fault.
   ignore_low and ignore_high are the halves of ignore_index, a 64-bit number.

   WEIGHTED   1: there are weights, else they are 1
   MEAN       1: grad is divided by total_weight
   EACH       1: grad [N, L], a gradient for each loss, else one for their sum
   PER_CLASS  1: see above */

#ifndef WEIGHTED
#define WEIGHTED 1
#endif
#ifndef MEAN
#define MEAN 0
#endif
#ifndef EACH
#define EACH 0
#endif
#ifndef PER_CLASS
#define PER_CLASS 0
#endif

#if WEIGHTED
#define WEIGHT(c) weight[weight_at + (c)]
#else
#define WEIGHT(c) 1.0f
#endif

/* The class, or -1 where it is ignored. */
static inline int class_of(long target, int ignore_low, int ignore_high, int classes, __global int *fault, int node)
{
    const long ignored = ((long)ignore_high << 32) | (long)(uint)ignore_low;
    if (target == ignored)
        return -1;
    if (target < 0 || target >= classes) {
        fault[0] = node + 1;
        fault[1] = (int)clamp(target, (long)INT_MIN, (long)INT_MAX);
        return 0;
    }
    return (int)target;
}

__kernel void nll_forward(__global const float *x, int x_at, __global const long *target, int target_at,
                          __global const float *weight, int weight_at, __global float *losses, int losses_at,
                          int positions, int classes, int batch, int ignore_low, int ignore_high, __global int *fault,
                          int fault_at, int node)
{
    const int l = (int)get_global_id(0), n = (int)get_global_id(1);
    if (l >= positions || n >= batch)
        return;
    const int place = n * positions + l;
    const int c = class_of(target[target_at + place], ignore_low, ignore_high, classes, fault + fault_at, node);
    float used = 0.0f, loss = 0.0f;
    if (c >= 0) {
        used = WEIGHT(c);
        loss = -x[x_at + (n * classes + c) * positions + l] * used;
    }
    losses[losses_at + place] = loss;
    losses[losses_at + batch * positions + place] = used;
}

__kernel void nll_backward(__global const float *grad, int grad_at, __global const long *target, int target_at,
                           __global const float *weight, int weight_at, __global const float *total_weight,
                           int total_weight_at, __global float *grad_x, int grad_x_at, int positions, int classes,
                           int batch, int ignore_low, int ignore_high, __global int *fault, int fault_at, int node)
{
#if PER_CLASS
    const int l = 0, c = (int)get_global_id(0), n = (int)get_global_id(1);
#else
    const int l = (int)get_global_id(0), c = (int)get_global_id(1), n = (int)get_global_id(2);
#endif
    if (l >= positions || c >= classes || n >= batch)
        return;
    const int place = n * positions + l;
    const int wanted = class_of(target[target_at + place], ignore_low, ignore_high, classes, fault + fault_at, node);
    float value = 0.0f;
    if (c == wanted) {
        value = -grad[grad_at + (EACH ? place : 0)];
#if MEAN
        value /= total_weight[total_weight_at];
#endif
        value *= WEIGHT(c);
    }
    grad_x[grad_x_at + (n * classes + c) * positions + l] = value;
}
