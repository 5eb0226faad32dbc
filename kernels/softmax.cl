/* Softmax and log-softmax along one dimension, and their backward passes.

       softmax        out = exp(x - max x) / sum exp(x - max x)       grad_x = out (grad - sum(grad out))
       log_softmax    out = x - max x - log sum exp(x - max x)        grad_x = grad - exp(out) sum grad

       x, out, grad, grad_x [A, R, B]      A outer, R along the softmax, B inner; all dense

   softmax_item, softmax_backward_item          an item owns a row (B = 1), VW elements at a time
   softmax_group, softmax_backward_group        LANES items own a row (B = 1); ROWS rows in a group
   softmax_columns, softmax_backward_columns    an item owns VW neighbouring columns; items lie along B

   Assumed: local size (LANES, ROWS) in the group forms; LANES a power of two. The row forms with VW > 1 read vectors
   from any place; a device that cannot is given rows that start at multiples of VW.

   LOG          1: log-softmax
   RECOMPUTE    1, softmax_columns: exponentials are made twice, not written and read back. On GPUs that is cheaper,
                and an item must not read what the same launch writes: reads may come from a cache that never hears of it
   VW           elements that an item handles at once: 1, 2, 4, 8 or 16
   LANES, ROWS  shape of a group; where LANES is defined, the file has the group forms only */

#ifndef LOG
#define LOG 0
#endif
#ifndef RECOMPUTE
#define RECOMPUTE 1
#endif
#ifndef VW
#define VW 1
#endif
#ifndef ROWS
#define ROWS 1
#endif

#define CHAIN 64 /* additions in one chain, before its sum is added to another: rounding errors stay few */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if VW == 1
typedef float real;
#define LOAD(p) (*(p))
#define STORE(v, p) (*(p) = (v))
#else
typedef JOIN(float, VW) real;
#define LOAD(p) JOIN(vload, VW)(0, p)
#define STORE(v, p) JOIN(vstore, VW)(v, 0, p)
#endif

/* The sum or the largest of a vector's elements, in a fixed order. NaN need not be the largest: it comes back in the
   sum of the exponentials. */
#define ADDED(a, b) ((a) + (b))
#define LARGER(a, b) fmax(a, b)
#if VW == 1
#define ACROSS(OP, v) (v)
#elif VW == 2
#define ACROSS(OP, v) OP(v.x, v.y)
#elif VW == 4
#define ACROSS(OP, v) OP(OP(v.x, v.z), OP(v.y, v.w))
#elif VW == 8
#define ACROSS(OP, v) OP(OP(OP(v.s0, v.s4), OP(v.s2, v.s6)), OP(OP(v.s1, v.s5), OP(v.s3, v.s7)))
#else
#define ACROSS(OP, v) \
    OP(OP(OP(OP(v.s0, v.s8), OP(v.s4, v.sc)), OP(OP(v.s2, v.sa), OP(v.s6, v.se))), \
       OP(OP(OP(v.s1, v.s9), OP(v.s5, v.sd)), OP(OP(v.s3, v.sb), OP(v.s7, v.sf))))
#endif

#if LOG
#define FORWARD(x) (((x) - top) - rest)
#else
#define FORWARD(x) (exp((x) - top) / sum)
#endif

/* TERM is what is summed along a row going backward. */

#if LOG
#define TERM(grad, out) (grad)
#define BACKWARD(grad, out, sum) ((grad) - exp(out) * (sum))
#else
#define TERM(grad, out) ((grad) * (out))
#define BACKWARD(grad, out, sum) ((out) * ((grad) - (sum)))
#endif

#ifndef LANES

__kernel void softmax_item(__global const float *x, int x_at, __global float *out, int out_at, int rows, int length)
{
    const int row = (int)get_global_id(0);
    if (row >= rows)
        return;
    __global const float *from = x + x_at + row * length;
    __global float *to = out + out_at + row * length;
    const int whole = length / VW * VW;
    real most = (real)(-INFINITY);
    for (int i = 0; i < whole; i += VW)
        most = fmax(most, LOAD(from + i));
    float top = ACROSS(LARGER, most);
    for (int i = whole; i < length; ++i)
        top = fmax(top, from[i]);

    real sums = (real)(0.0f);
    for (int block = 0; block < whole; block += CHAIN * VW) {
        const int end = min(whole, block + CHAIN * VW);
        real part = (real)(0.0f);
        for (int i = block; i < end; i += VW) {
            const real each = exp(LOAD(from + i) - top);
            part += each;
#if !LOG
            STORE(each, to + i);
#endif
        }
        sums += part;
    }
    float sum = ACROSS(ADDED, sums);
    for (int i = whole; i < length; ++i) {
        const float each = exp(from[i] - top);
        sum += each;
#if !LOG
        to[i] = each;
#endif
    }
#if LOG
    const float rest = log(sum);
    for (int i = 0; i < whole; i += VW)
        STORE((LOAD(from + i) - top) - rest, to + i);
    for (int i = whole; i < length; ++i)
        to[i] = (from[i] - top) - rest;
#else
    for (int i = 0; i < whole; i += VW)
        STORE(LOAD(to + i) / sum, to + i);
    for (int i = whole; i < length; ++i)
        to[i] /= sum;
#endif
}

__kernel void softmax_columns(__global const float *x, int x_at, __global float *out, int out_at, int columns, int length,
                              int outer)
{
    const int column = (int)get_global_id(0) * VW, a = (int)get_global_id(1);
    if (column >= columns || a >= outer)
        return;
    const int start = a * length * columns + column, end = start + length * columns;
    __global const float *from = x + x_at;
    __global float *to = out + out_at;
    real top = (real)(-INFINITY);
#pragma unroll 1
    for (int i = start; i < end; i += columns)
        top = fmax(top, LOAD(from + i));
    real sum = (real)(0.0f);
#pragma unroll 1
    for (int i = start; i < end; i += columns) {
        const real each = exp(LOAD(from + i) - top);
        sum += each;
#if !LOG && !RECOMPUTE
        STORE(each, to + i);
#endif
    }
#if LOG
    const real rest = log(sum);
#endif
#pragma unroll 1
    for (int i = start; i < end; i += columns) {
#if LOG || RECOMPUTE
        STORE(FORWARD(LOAD(from + i)), to + i);
#else
        STORE(LOAD(to + i) / sum, to + i);
#endif
    }
}

__kernel void softmax_backward_item(__global const float *grad, int grad_at, __global const float *out, int out_at,
                                    __global float *grad_x, int grad_x_at, int rows, int length)
{
    const int row = (int)get_global_id(0);
    if (row >= rows)
        return;
    const int start = row * length, whole = length / VW * VW;
    __global const float *g = grad + grad_at + start, *y = out + out_at + start;
    __global float *to = grad_x + grad_x_at + start;
    real sums = (real)(0.0f);
    for (int block = 0; block < whole; block += CHAIN * VW) {
        const int end = min(whole, block + CHAIN * VW);
        real part = (real)(0.0f);
        for (int i = block; i < end; i += VW)
            part += TERM(LOAD(g + i), LOAD(y + i));
        sums += part;
    }
    float sum = ACROSS(ADDED, sums);
    for (int i = whole; i < length; ++i)
        sum += TERM(g[i], y[i]);
    for (int i = 0; i < whole; i += VW)
        STORE(BACKWARD(LOAD(g + i), LOAD(y + i), sum), to + i);
    for (int i = whole; i < length; ++i)
        to[i] = BACKWARD(g[i], y[i], sum);
}

__kernel void softmax_backward_columns(__global const float *grad, int grad_at, __global const float *out, int out_at,
                                       __global float *grad_x, int grad_x_at, int columns, int length, int outer)
{
    const int column = (int)get_global_id(0) * VW, a = (int)get_global_id(1);
    if (column >= columns || a >= outer)
        return;
    const int start = a * length * columns + column, end = start + length * columns;
    __global const float *g = grad + grad_at, *y = out + out_at;
    real sum = (real)(0.0f);
#pragma unroll 1
    for (int i = start; i < end; i += columns)
        sum += TERM(LOAD(g + i), LOAD(y + i));
#pragma unroll 1
    for (int i = start; i < end; i += columns)
        STORE(BACKWARD(LOAD(g + i), LOAD(y + i), sum), grad_x + grad_x_at + i);
}

#else

/* The values of a row's lanes combined, in a fixed order; all items of the group come here. */
static inline float sum_of_lanes(float value, __local float *shared, int lane, int mine)
{
    shared[mine] = value;
#pragma unroll 1
    for (int half_way = LANES / 2; half_way > 0; half_way /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_way)
            shared[mine] = ADDED(shared[mine], shared[mine + half_way]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float all = shared[mine - lane];
    barrier(CLK_LOCAL_MEM_FENCE);
    return all;
}

static inline float largest_of_lanes(float value, __local float *shared, int lane, int mine)
{
    shared[mine] = value;
#pragma unroll 1
    for (int half_way = LANES / 2; half_way > 0; half_way /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_way)
            shared[mine] = LARGER(shared[mine], shared[mine + half_way]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float all = shared[mine - lane];
    barrier(CLK_LOCAL_MEM_FENCE);
    return all;
}

/* On GPUs a second exp costs less than writing and reading it. */
__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void softmax_group(__global const float *x, int x_at, __global float *out, int out_at, int rows, int length)
{
    __local float shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1);
    const int mine = (int)get_local_id(1) * LANES + lane, start = min(row, rows - 1) * length;
    __global const float *from = x + x_at + start;
    __global float *to = out + out_at + start;
    const int whole = length / VW * VW;
    real most = (real)(-INFINITY);
#pragma unroll 1
    for (int i = lane * VW; i < whole; i += LANES * VW)
        most = fmax(most, LOAD(from + i));
    float top = ACROSS(LARGER, most);
#if VW > 1
#pragma unroll 1
    for (int i = whole + lane; i < length; i += LANES)
        top = fmax(top, from[i]);
#endif
    top = largest_of_lanes(top, shared, lane, mine);

    real sums = (real)(0.0f);
#pragma unroll 1
    for (int i = lane * VW; i < whole; i += LANES * VW)
        sums += exp(LOAD(from + i) - top);
    float sum = ACROSS(ADDED, sums);
#if VW > 1
#pragma unroll 1
    for (int i = whole + lane; i < length; i += LANES)
        sum += exp(from[i] - top);
#endif
    sum = sum_of_lanes(sum, shared, lane, mine);

    if (row >= rows)
        return;
#if LOG
    const float rest = log(sum);
#endif
#pragma unroll 1
    for (int i = lane * VW; i < whole; i += LANES * VW)
        STORE(FORWARD(LOAD(from + i)), to + i);
#if VW > 1
#pragma unroll 1
    for (int i = whole + lane; i < length; i += LANES)
        to[i] = FORWARD(from[i]);
#endif
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void softmax_backward_group(__global const float *grad, int grad_at, __global const float *out, int out_at,
                            __global float *grad_x, int grad_x_at, int rows, int length)
{
    __local float shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1);
    const int mine = (int)get_local_id(1) * LANES + lane, start = min(row, rows - 1) * length;
    const int whole = length / VW * VW;
    __global const float *g = grad + grad_at + start, *y = out + out_at + start;
    __global float *to = grad_x + grad_x_at + start;
    real sums = (real)(0.0f);
#pragma unroll 1
    for (int i = lane * VW; i < whole; i += LANES * VW)
        sums += TERM(LOAD(g + i), LOAD(y + i));
    float sum = ACROSS(ADDED, sums);
#if VW > 1
#pragma unroll 1
    for (int i = whole + lane; i < length; i += LANES)
        sum += TERM(g[i], y[i]);
#endif
    sum = sum_of_lanes(sum, shared, lane, mine);
    if (row >= rows)
        return;
#pragma unroll 1
    for (int i = lane * VW; i < whole; i += LANES * VW)
        STORE(BACKWARD(LOAD(g + i), LOAD(y + i), sum), to + i);
#if VW > 1
#pragma unroll 1
    for (int i = whole + lane; i < length; i += LANES)
        to[i] = BACKWARD(g[i], y[i], sum);
#endif
}

#endif
