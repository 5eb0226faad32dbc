/* Normalisation forward: layer norm whole; of group and batch norm the statistics, which elementwise chains then apply.

       out = (x - mean) rstd w + b         rstd = 1 / sqrt(variance + eps), variance = mean of (x - mean)^2

       rows [M, D] of a layer norm; rows [N, C, L] of a group or batch norm: N batch, C channels, L positions

   layer_norm_item, _group   out, mean [M] and rstd [M] of rows [M, D]
   moments_item, _group      mean and M2 (the sum of squared distances from it) of each row
   moments_merge             mean and M2 of columns, from those of their parts (Chan, Golub, LeVeque 1979)
   batch_norm_finish         invstd and the new running statistics, from M2

   In the _item forms an item owns a row, VW elements at a time; in the _group forms LANES items do, ROWS rows in a
   group. Assumed: dense tensors; local size (LANES, ROWS, 1) in the group forms; LANES a power of two. Row forms with
   VW > 1 read vectors from any place; a device that cannot is given rows that start at multiples of VW.

   WEIGHTED, BIASED  1: there are w, b
   LEAF              1, moments_merge: the parts are single elements, so M2 is 0
   VW                elements that an item handles at once: 1, 2, 4, 8 or 16
   LANES, ROWS       shape of a group; where LANES is defined, the file has the group forms only */

#ifndef WEIGHTED
#define WEIGHTED 1
#endif
#ifndef BIASED
#define BIASED 1
#endif
#ifndef LEAF
#define LEAF 0
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
#define SUM(v) (v)
#else
typedef JOIN(float, VW) real;
#define LOAD(p) JOIN(vload, VW)(0, p)
#define STORE(v, p) JOIN(vstore, VW)(v, 0, p)
#if VW == 2
#define SUM(v) (v.x + v.y)
#elif VW == 4
#define SUM(v) ((v.x + v.z) + (v.y + v.w))
#elif VW == 8
#define SUM(v) (((v.s0 + v.s4) + (v.s2 + v.s6)) + ((v.s1 + v.s5) + (v.s3 + v.s7)))
#else
#define SUM(v) \
    ((((v.s0 + v.s8) + (v.s4 + v.sc)) + ((v.s2 + v.sa) + (v.s6 + v.se))) + \
     (((v.s1 + v.s9) + (v.s5 + v.sd)) + ((v.s3 + v.sb) + (v.s7 + v.sf))))
#endif
#endif

#if WEIGHTED
#define BY_WEIGHT(x, load, i) ((x) * load(w + w_at + (i)))
#else
#define BY_WEIGHT(x, load, i) (x)
#endif
#if BIASED
#define PLUS_BIAS(x, load, i) ((x) + load(b + b_at + (i)))
#else
#define PLUS_BIAS(x, load, i) (x)
#endif
#define ONE(p) (*(p))

/* A mean that is off by more than 2^-22 of the deviation is put right: divisions are rough on GPUs. A smaller distance is
   what rounding made of the distances themselves. */
#define CORRECTED(about, off, variance) ((off) * (off) > 5.7e-14f * (variance) ? (about) + (off) : (about))

/* A variance that rounding made negative is 0; NaN stays NaN. */
#define RSTD(variance) (1.0f / sqrt(((variance) < 0.0f ? 0.0f : (variance)) + eps))

/* Elements first, first + step, ... of a row; step is a multiple of VW. The remainder of a row is taken singly. */
static inline float sum_along(__global const float *x, int first, int whole, int length, int step)
{
    real all = (real)(0.0f);
    int i = first * VW;
#pragma unroll 1
    while (i < whole) {
        const int end = min(whole, i + CHAIN * step);
        real part = (real)(0.0f);
        for (; i < end; i += step)
            part += LOAD(x + i);
        all += part;
    }
    float sum = SUM(all);
#if VW > 1
#pragma unroll 1
    for (i = whole + first; i < length; i += step / VW)
        sum += x[i];
#endif
    return sum;
}

/* x: the sum of squared distances from a mean; y: the sum of distances, which is what rounding has done to the mean. */
static inline float2 distances_along(__global const float *x, float mean, int first, int whole, int length, int step)
{
    real squares = (real)(0.0f), all = (real)(0.0f);
    int i = first * VW;
#pragma unroll 1
    while (i < whole) {
        const int end = min(whole, i + CHAIN * step);
        real squares_part = (real)(0.0f), part = (real)(0.0f);
        for (; i < end; i += step) {
            const real away = LOAD(x + i) - mean;
            squares_part += away * away;
            part += away;
        }
        squares += squares_part;
        all += part;
    }
    float2 sums = (float2)(SUM(squares), SUM(all));
#if VW > 1
#pragma unroll 1
    for (i = whole + first; i < length; i += step / VW) {
        const float away = x[i] - mean;
        sums += (float2)(away * away, away);
    }
#endif
    return sums;
}

#ifndef LANES

__kernel void layer_norm_item(__global const float *x, int x_at, __global const float *w, int w_at,
                              __global const float *b, int b_at, __global float *out, int out_at,
                              __global float *means, int means_at, __global float *rstds, int rstds_at, int rows,
                              int length, float eps)
{
    const int row = (int)get_global_id(0);
    if (row >= rows)
        return;
    __global const float *from = x + x_at + row * length;
    __global float *to = out + out_at + row * length;
    const int whole = length / VW * VW;
    const float about = sum_along(from, 0, whole, length, VW) / (float)length;
    const float2 sums = distances_along(from, about, 0, whole, length, VW) / (float)length;
    const float mean = CORRECTED(about, sums.y, sums.x), rstd = RSTD(sums.x - sums.y * sums.y);
    for (int i = 0; i < whole; i += VW)
        STORE(PLUS_BIAS(BY_WEIGHT((LOAD(from + i) - mean) * rstd, LOAD, i), LOAD, i), to + i);
    for (int i = whole; i < length; ++i)
        to[i] = PLUS_BIAS(BY_WEIGHT((from[i] - mean) * rstd, ONE, i), ONE, i);
    means[means_at + row] = mean;
    rstds[rstds_at + row] = rstd;
}

__kernel void moments_item(__global const float *x, int x_at, __global float *means, int means_at,
                           __global float *squares, int squares_at, int rows, int length)
{
    const int row = (int)get_global_id(0);
    if (row >= rows)
        return;
    __global const float *from = x + x_at + row * length;
    const int whole = length / VW * VW;
    const float about = sum_along(from, 0, whole, length, VW) / (float)length;
    const float2 sums = distances_along(from, about, 0, whole, length, VW);
    const float off = sums.y / (float)length;
    means[means_at + row] = CORRECTED(about, off, sums.x / (float)length);
    squares[squares_at + row] = sums.x - sums.y * off;
}

/* Parts [P, C] of `each` elements, the last of `last`: segment s has parts s * segment and on; merged [S, C]. */
__kernel void moments_merge(__global const float *means, int means_at, __global const float *squares, int squares_at,
                            __global float *merged_means, int merged_means_at, __global float *merged_squares,
                            int merged_squares_at, int columns, int parts, int segment, int segments, float each,
                            float last)
{
    const int column = (int)get_global_id(0), s = (int)get_global_id(1);
    if (column >= columns || s >= segments)
        return;
    const int first = s * segment, end = min(parts, first + segment);
    means += means_at + column;
    squares += squares_at + column;
    float sum = 0.0f;
#pragma unroll 1
    for (int part = first; part < end; ++part)
        sum += means[part * columns] * (part == parts - 1 ? last : each);
    const float count = (float)(end - first - 1) * each + (end == parts ? last : each);
    const float about = sum / count;
    float all = 0.0f, distances = 0.0f;
#pragma unroll 1
    for (int part = first; part < end; ++part) {
        const float away = means[part * columns] - about, weighed = away * (part == parts - 1 ? last : each);
        distances += weighed;
        all += away * weighed;
#if !LEAF
        all += squares[part * columns];
#endif
    }
    const float off = distances / count;
    merged_means[merged_means_at + s * columns + column] = CORRECTED(about, off, all / count);
    merged_squares[merged_squares_at + s * columns + column] = all - distances * off;
}

__kernel void batch_norm_finish(__global const float *means, int means_at, __global const float *squares,
                                int squares_at, __global const float *running_mean, int running_mean_at,
                                __global const float *running_var, int running_var_at, __global float *invstds,
                                int invstds_at, __global float *new_mean, int new_mean_at, __global float *new_var,
                                int new_var_at, int channels, float count, float unbiased, float momentum, float eps)
{
    const int c = (int)get_global_id(0);
    if (c >= channels)
        return;
    const float variance = squares[squares_at + c] / count, kept = 1.0f - momentum;
    invstds[invstds_at + c] = RSTD(variance);
    new_mean[new_mean_at + c] = kept * running_mean[running_mean_at + c] + momentum * means[means_at + c];
    new_var[new_var_at + c] = kept * running_var[running_var_at + c] + momentum * (variance * unbiased);
}

#else

/* The two sums over a row's lanes in a fixed order; all items of the group come here. */
static inline float2 sums_of_lanes(float2 value, __local float2 *shared, int lane, int mine)
{
    shared[mine] = value;
#pragma unroll 1
    for (int half_way = LANES / 2; half_way > 0; half_way /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_way)
            shared[mine] += shared[mine + half_way];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float2 all = shared[mine - lane];
    barrier(CLK_LOCAL_MEM_FENCE);
    return all;
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void layer_norm_group(__global const float *x, int x_at, __global const float *w, int w_at, __global const float *b,
                      int b_at, __global float *out, int out_at, __global float *means, int means_at,
                      __global float *rstds, int rstds_at, int rows, int length, float eps)
{
    __local float2 shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1);
    const int mine = (int)get_local_id(1) * LANES + lane, start = min(row, rows - 1) * length;
    __global const float *from = x + x_at + start;
    __global float *to = out + out_at + start;
    const int whole = length / VW * VW;
    const float2 sum = (float2)(sum_along(from, lane, whole, length, LANES * VW), 0.0f);
    const float about = sums_of_lanes(sum, shared, lane, mine).x / (float)length;
    const float2 own = distances_along(from, about, lane, whole, length, LANES * VW);
    const float2 sums = sums_of_lanes(own, shared, lane, mine) / (float)length;
    const float mean = CORRECTED(about, sums.y, sums.x), rstd = RSTD(sums.x - sums.y * sums.y);
    if (row >= rows)
        return;
#pragma unroll 1
    for (int i = lane * VW; i < whole; i += LANES * VW)
        STORE(PLUS_BIAS(BY_WEIGHT((LOAD(from + i) - mean) * rstd, LOAD, i), LOAD, i), to + i);
#if VW > 1
#pragma unroll 1
    for (int i = whole + lane; i < length; i += LANES)
        to[i] = PLUS_BIAS(BY_WEIGHT((from[i] - mean) * rstd, ONE, i), ONE, i);
#endif
    if (lane == 0) {
        means[means_at + row] = mean;
        rstds[rstds_at + row] = rstd;
    }
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void moments_group(__global const float *x, int x_at, __global float *means, int means_at, __global float *squares,
                   int squares_at, int rows, int length)
{
    __local float2 shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1);
    const int mine = (int)get_local_id(1) * LANES + lane;
    __global const float *from = x + x_at + min(row, rows - 1) * length;
    const int whole = length / VW * VW;
    const float2 sum = (float2)(sum_along(from, lane, whole, length, LANES * VW), 0.0f);
    const float about = sums_of_lanes(sum, shared, lane, mine).x / (float)length;
    const float2 own = distances_along(from, about, lane, whole, length, LANES * VW);
    const float2 sums = sums_of_lanes(own, shared, lane, mine);
    if (lane == 0 && row < rows) {
        const float off = sums.y / (float)length;
        means[means_at + row] = CORRECTED(about, off, sums.x / (float)length);
        squares[squares_at + row] = sums.x - sums.y * off;
    }
}

#endif
