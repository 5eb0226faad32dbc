/* Normalisation: layer norm whole; of group and batch norm the sums, whose results elementwise chains then apply.

       hat = (x - mean) rstd                 rstd = 1 / sqrt(variance + eps), variance = mean of (x - mean)^2
       out = hat w + b
       grad_x = rstd (gw - mean(gw) - hat mean(gw hat)),  gw = grad w
       grad_w = sum of grad hat,  grad_b = sum of grad, over all but the channels

       rows [M, D] of a layer norm; [N, C, L] of a group or batch norm: N batch, C channels, L positions

   layer_norm_item, _group             out, mean [M] and rstd [M] of rows [M, D]
   layer_norm_backward_item, _group    grad_x
   moments_item, _group                mean and M2 (the sum of squared distances from it) of each row; what rounding
                                       and a GPU's division did to the mean is measured and put right
   moments_merge                       mean and M2 of columns, from those of their parts (Chan, Golub, LeVeque 1979)
   norm_sums_item, _group              sums of grad and of grad hat over each row of L
   norm_sums_columns                   the same over columns of [M, D]
   norm_coefficients                   what an elementwise chain needs to make grad_x of those sums
   batch_norm_finish                   invstd and the new running statistics, from M2

   In the _item forms an item owns a row, VW elements at a time; in the _group forms LANES items do, ROWS rows in a
   group. Assumed: dense tensors; local size (LANES, ROWS, 1) in the group forms; VW divides columns where items lie
   along them; LANES a power of two.

   WEIGHTED, BIASED  1: there are w, b
   LEAF              1, moments_merge: the parts are single elements, so M2 is 0
   BY_ROW            1, norm_sums_columns: mean and rstd [M] belong to rows (layer norm), else to columns [D]
   VW, LANES, ROWS   as above
   NV                vectors of an item of norm_sums_columns: several on processors, whose caches want whole lines */

#ifndef WEIGHTED
#define WEIGHTED 1
#endif
#ifndef BIASED
#define BIASED 1
#endif
#ifndef LEAF
#define LEAF 0
#endif
#ifndef BY_ROW
#define BY_ROW 1
#endif
#ifndef VW
#define VW 1
#endif
#ifndef NV
#define NV 1
#endif
#ifndef LANES
#define LANES 64
#endif
#ifndef ROWS
#define ROWS 1
#endif

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

#define CHAIN 64 /* additions in one chain, before its sum is added to another: rounding errors stay few */

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

/* The sum over a row's lanes in a fixed order; all items of the group come here. */
static inline float sum_of_lanes(float value, __local float *shared, int lane, int mine)
{
    shared[mine] = value;
#pragma unroll 1
    for (int half_way = LANES / 2; half_way > 0; half_way /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_way)
            shared[mine] += shared[mine + half_way];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float all = shared[mine - lane];
    barrier(CLK_LOCAL_MEM_FENCE);
    return all;
}

/* Layer norm. */

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
    const float mean = about + sums.y, rstd = RSTD(sums.x - sums.y * sums.y);
    for (int i = 0; i < whole; i += VW)
        STORE(PLUS_BIAS(BY_WEIGHT((LOAD(from + i) - mean) * rstd, LOAD, i), LOAD, i), to + i);
    for (int i = whole; i < length; ++i)
        to[i] = PLUS_BIAS(BY_WEIGHT((from[i] - mean) * rstd, ONE, i), ONE, i);
    means[means_at + row] = mean;
    rstds[rstds_at + row] = rstd;
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void layer_norm_group(__global const float *x, int x_at, __global const float *w, int w_at, __global const float *b,
                      int b_at, __global float *out, int out_at, __global float *means, int means_at,
                      __global float *rstds, int rstds_at, int rows, int length, float eps)
{
    __local float shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1);
    const int mine = (int)get_local_id(1) * LANES + lane, start = min(row, rows - 1) * length;
    __global const float *from = x + x_at + start;
    __global float *to = out + out_at + start;
    const int whole = length / VW * VW;
    const float sum = sum_along(from, lane, whole, length, LANES * VW);
    const float about = sum_of_lanes(sum, shared, lane, mine) / (float)length;
    const float2 own = distances_along(from, about, lane, whole, length, LANES * VW);
    const float squares = sum_of_lanes(own.x, shared, lane, mine) / (float)length;
    const float off = sum_of_lanes(own.y, shared, lane, mine) / (float)length;
    const float mean = about + off, rstd = RSTD(squares - off * off);
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

/* The two sums of a row that its gradient needs: x of gw, y of gw hat. */
static inline float2 gradient_sums(__global const float *grad, __global const float *x, __global const float *w,
                                   int w_at, float mean, float rstd, int first, int whole, int length, int step)
{
    real plain = (real)(0.0f), along = (real)(0.0f);
    int i = first * VW;
#pragma unroll 1
    while (i < whole) {
        const int end = min(whole, i + CHAIN * step);
        real plain_part = (real)(0.0f), along_part = (real)(0.0f);
        for (; i < end; i += step) {
            const real gw = BY_WEIGHT(LOAD(grad + i), LOAD, i);
            plain_part += gw;
            along_part += gw * ((LOAD(x + i) - mean) * rstd);
        }
        plain += plain_part;
        along += along_part;
    }
    float2 sums = (float2)(SUM(plain), SUM(along));
#if VW > 1
#pragma unroll 1
    for (i = whole + first; i < length; i += step / VW) {
        const float gw = BY_WEIGHT(grad[i], ONE, i);
        sums += (float2)(gw, gw * ((x[i] - mean) * rstd));
    }
#endif
    return sums;
}

/* gw is a variable of its own, so that grad w - plain is no mad: it is exactly 0 where a row has one element. */
#define INWARD(gw, x) (rstd * (((gw) - plain) - ((x) - mean) * rstd * along))

__kernel void layer_norm_backward_item(__global const float *grad, int grad_at, __global const float *x, int x_at,
                                       __global const float *means, int means_at, __global const float *rstds,
                                       int rstds_at, __global const float *w, int w_at, __global float *grad_x,
                                       int grad_x_at, int rows, int length)
{
    const int row = (int)get_global_id(0);
    if (row >= rows)
        return;
    const int start = row * length, whole = length / VW * VW;
    __global const float *g = grad + grad_at + start, *from = x + x_at + start;
    __global float *to = grad_x + grad_x_at + start;
    const float mean = means[means_at + row], rstd = rstds[rstds_at + row];
    const float2 sums = gradient_sums(g, from, w, w_at, mean, rstd, 0, whole, length, VW);
    const float plain = sums.x / (float)length, along = sums.y / (float)length;
    for (int i = 0; i < whole; i += VW) {
        const real gw = BY_WEIGHT(LOAD(g + i), LOAD, i);
        STORE(INWARD(gw, LOAD(from + i)), to + i);
    }
    for (int i = whole; i < length; ++i) {
        const float gw = BY_WEIGHT(g[i], ONE, i);
        to[i] = INWARD(gw, from[i]);
    }
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void layer_norm_backward_group(__global const float *grad, int grad_at, __global const float *x, int x_at,
                               __global const float *means, int means_at, __global const float *rstds, int rstds_at,
                               __global const float *w, int w_at, __global float *grad_x, int grad_x_at, int rows,
                               int length)
{
    __local float shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1), this_row = min(row, rows - 1);
    const int mine = (int)get_local_id(1) * LANES + lane, start = this_row * length, whole = length / VW * VW;
    __global const float *g = grad + grad_at + start, *from = x + x_at + start;
    __global float *to = grad_x + grad_x_at + start;
    const float mean = means[means_at + this_row], rstd = rstds[rstds_at + this_row];
    const float2 sums = gradient_sums(g, from, w, w_at, mean, rstd, lane, whole, length, LANES * VW);
    const float plain = sum_of_lanes(sums.x, shared, lane, mine) / (float)length;
    const float along = sum_of_lanes(sums.y, shared, lane, mine) / (float)length;
    if (row >= rows)
        return;
#pragma unroll 1
    for (int i = lane * VW; i < whole; i += LANES * VW) {
        const real gw = BY_WEIGHT(LOAD(g + i), LOAD, i);
        STORE(INWARD(gw, LOAD(from + i)), to + i);
    }
#if VW > 1
#pragma unroll 1
    for (int i = whole + lane; i < length; i += LANES) {
        const float gw = BY_WEIGHT(g[i], ONE, i);
        to[i] = INWARD(gw, from[i]);
    }
#endif
}

/* Moments. */

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
    means[means_at + row] = about + sums.y / (float)length;
    squares[squares_at + row] = sums.x - sums.y * sums.y / (float)length;
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void moments_group(__global const float *x, int x_at, __global float *means, int means_at, __global float *squares,
                   int squares_at, int rows, int length)
{
    __local float shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1);
    const int mine = (int)get_local_id(1) * LANES + lane;
    __global const float *from = x + x_at + min(row, rows - 1) * length;
    const int whole = length / VW * VW;
    const float sum = sum_along(from, lane, whole, length, LANES * VW);
    const float about = sum_of_lanes(sum, shared, lane, mine) / (float)length;
    const float2 own = distances_along(from, about, lane, whole, length, LANES * VW);
    const float all = sum_of_lanes(own.x, shared, lane, mine);
    const float off = sum_of_lanes(own.y, shared, lane, mine);
    if (lane == 0 && row < rows) {
        means[means_at + row] = about + off / (float)length;
        squares[squares_at + row] = all - off * off / (float)length;
    }
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
    float all = 0.0f, off = 0.0f;
#pragma unroll 1
    for (int part = first; part < end; ++part) {
        const float away = means[part * columns] - about, weighed = away * (part == parts - 1 ? last : each);
        off += weighed;
        all += away * weighed;
#if !LEAF
        all += squares[part * columns];
#endif
    }
    merged_means[merged_means_at + s * columns + column] = about + off / count;
    merged_squares[merged_squares_at + s * columns + column] = all - off * off / count;
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

/* Sums for gradients: [2, N, C] of grad and of grad hat. Row (n, c) has its mean and rstd at n * stride + c / share.
   Built with WEIGHTED = 0. */

__kernel void norm_sums_item(__global const float *grad, int grad_at, __global const float *x, int x_at,
                             __global const float *means, int means_at, __global const float *rstds, int rstds_at,
                             __global float *sums, int sums_at, int channels, int batch, int length, int stride,
                             int share)
{
    const int c = (int)get_global_id(0), n = (int)get_global_id(1);
    if (c >= channels || n >= batch)
        return;
    const int row = n * channels + c, place = n * stride + c / share, whole = length / VW * VW;
    const float mean = means[means_at + place], rstd = rstds[rstds_at + place];
    const float2 both = gradient_sums(grad + grad_at + row * length, x + x_at + row * length, x, 0, mean, rstd, 0,
                                      whole, length, VW);
    sums[sums_at + row] = both.x;
    sums[sums_at + batch * channels + row] = both.y;
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void norm_sums_group(__global const float *grad, int grad_at, __global const float *x, int x_at,
                     __global const float *means, int means_at, __global const float *rstds, int rstds_at,
                     __global float *sums, int sums_at, int channels, int batch, int length, int stride, int share)
{
    __local float shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), n = (int)get_global_id(2);
    const int c = min((int)get_global_id(1), channels - 1), mine = (int)get_local_id(1) * LANES + lane;
    const int row = n * channels + c, place = n * stride + c / share, whole = length / VW * VW;
    const float mean = means[means_at + place], rstd = rstds[rstds_at + place];
    const float2 own = gradient_sums(grad + grad_at + row * length, x + x_at + row * length, x, 0, mean, rstd, lane,
                                     whole, length, LANES * VW);
    const float plain = sum_of_lanes(own.x, shared, lane, mine);
    const float along = sum_of_lanes(own.y, shared, lane, mine);
    if (lane == 0 && (int)get_global_id(1) < channels) {
        sums[sums_at + row] = plain;
        sums[sums_at + batch * channels + row] = along;
    }
}

/* The same for columns of grad and x [M, D], in segments: [2, S, D]. */
__kernel void norm_sums_columns(__global const float *grad, int grad_at, __global const float *x, int x_at,
                                __global const float *means, int means_at, __global const float *rstds, int rstds_at,
                                __global float *sums, int sums_at, int columns, int length, int segment,
                                int segments)
{
    const int column = (int)get_global_id(0) * (VW * NV), s = (int)get_global_id(1);
    if (column >= columns || s >= segments)
        return;
    const int end = min(length, (s + 1) * segment);
    __global const float *g = grad + grad_at + column, *from = x + x_at + column;
    real plain[NV], along[NV];
#if !BY_ROW
    real mean[NV], rstd[NV];
#endif
#pragma unroll
    for (int v = 0; v < NV; ++v) {
        plain[v] = along[v] = (real)(0.0f);
#if !BY_ROW
        mean[v] = LOAD(means + means_at + column + v * VW);
        rstd[v] = LOAD(rstds + rstds_at + column + v * VW);
#endif
    }
    int row = s * segment;
#pragma unroll 1
    while (row < end) {
        const int stop = min(end, row + CHAIN);
        real plain_part[NV], along_part[NV];
#pragma unroll
        for (int v = 0; v < NV; ++v)
            plain_part[v] = along_part[v] = (real)(0.0f);
        for (; row < stop; ++row) {
#if BY_ROW
            const float row_mean = means[means_at + row], row_rstd = rstds[rstds_at + row];
#endif
#pragma unroll
            for (int v = 0; v < NV; ++v) {
                const real each = LOAD(g + row * columns + v * VW), value = LOAD(from + row * columns + v * VW);
                plain_part[v] += each;
#if BY_ROW
                along_part[v] += each * ((value - row_mean) * row_rstd);
#else
                along_part[v] += each * ((value - mean[v]) * rstd[v]);
#endif
            }
        }
#pragma unroll
        for (int v = 0; v < NV; ++v) {
            plain[v] += plain_part[v];
            along[v] += along_part[v];
        }
    }
#pragma unroll
    for (int v = 0; v < NV; ++v) {
        STORE(plain[v], sums + sums_at + s * columns + column + v * VW);
        STORE(along[v], sums + sums_at + (segments + s) * columns + column + v * VW);
    }
}

/* sums [2, C] of gw and gw hat over `count` elements each -> [3, C]: p = mean(gw), q = rstd mean(gw hat), r = rstd, times
   w with WEIGHTED, so that grad_x = ((grad - p) - (x - mean) q) r. */
__kernel void norm_coefficients(__global const float *sums, int sums_at, __global const float *rstds, int rstds_at,
                                __global const float *w, int w_at, __global float *out, int out_at, int channels,
                                float count)
{
    const int c = (int)get_global_id(0);
    if (c >= channels)
        return;
    const float rstd = rstds[rstds_at + c];
    out[out_at + c] = sums[sums_at + c] / count;
    out[out_at + channels + c] = sums[sums_at + channels + c] / count * rstd;
    out[out_at + 2 * channels + c] = BY_WEIGHT(rstd, ONE, c);
}
