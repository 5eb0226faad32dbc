/* Normalisation backward: layer norm whole; of group and batch norm the sums, of which elementwise chains make grad_x.

       hat = (x - mean) rstd, gw = grad w
       grad_x = rstd (gw - mean(gw) - hat mean(gw hat))
       grad_w = sum of grad hat, grad_b = sum of grad, over all but the channels

       rows [M, D] of a layer norm; rows [N, C, L] of a group or batch norm: N batch, C channels, L positions

   layer_norm_backward_item, _group   grad_x of rows [M, D]
   norm_sums_item, _group             sums of grad and of grad hat over each row of L: [2, N, C]; built with WEIGHTED = 0
   norm_sums_columns                  the same over columns of [M, D], in S segments: [2, S, D]
   norm_coefficients                  what an elementwise chain needs to make grad_x of those sums

   In the _item forms an item owns a row, VW elements at a time; in the _group forms LANES items do, ROWS rows in a
   group. Assumed: dense tensors; local size (LANES, ROWS, 1) in the group forms; LANES a power of two; VW NV divides
   the columns. Row forms with VW > 1 read vectors from any place; a device that cannot is given rows that start at
   multiples of VW.

   WEIGHTED     1: there is w
   BY_ROW       1, norm_sums_columns: mean and rstd [M] belong to rows (layer norm), else to columns [D]
   VW           elements that an item handles at once: 1, 2, 4, 8 or 16
   NV           vectors of an item of norm_sums_columns: several on processors, whose caches want whole lines
   LANES, ROWS  shape of a group; where LANES is defined, the file has the group forms only */

#ifndef WEIGHTED
#define WEIGHTED 1
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
#define ONE(p) (*(p))

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

#ifndef LANES

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

/* Row (n, c) has its mean and rstd at n * stride + c / share. */
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
void layer_norm_backward_group(__global const float *grad, int grad_at, __global const float *x, int x_at,
                               __global const float *means, int means_at, __global const float *rstds, int rstds_at,
                               __global const float *w, int w_at, __global float *grad_x, int grad_x_at, int rows,
                               int length)
{
    __local float2 shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), row = (int)get_global_id(1), this_row = min(row, rows - 1);
    const int mine = (int)get_local_id(1) * LANES + lane, start = this_row * length, whole = length / VW * VW;
    __global const float *g = grad + grad_at + start, *from = x + x_at + start;
    __global float *to = grad_x + grad_x_at + start;
    const float mean = means[means_at + this_row], rstd = rstds[rstds_at + this_row];
    const float2 own = gradient_sums(g, from, w, w_at, mean, rstd, lane, whole, length, LANES * VW);
    const float2 sums = sums_of_lanes(own, shared, lane, mine) / (float)length;
    const float plain = sums.x, along = sums.y;
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

/* Row (n, c) has its mean and rstd at n * stride + c / share. */
__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void norm_sums_group(__global const float *grad, int grad_at, __global const float *x, int x_at,
                     __global const float *means, int means_at, __global const float *rstds, int rstds_at,
                     __global float *sums, int sums_at, int channels, int batch, int length, int stride, int share)
{
    __local float2 shared[LANES * ROWS];
    const int lane = (int)get_local_id(0), n = (int)get_global_id(2);
    const int c = min((int)get_global_id(1), channels - 1), mine = (int)get_local_id(1) * LANES + lane;
    const int row = n * channels + c, place = n * stride + c / share, whole = length / VW * VW;
    const float mean = means[means_at + place], rstd = rstds[rstds_at + place];
    const float2 own = gradient_sums(grad + grad_at + row * length, x + x_at + row * length, x, 0, mean, rstd, lane,
                                     whole, length, LANES * VW);
    const float2 both = sums_of_lanes(own, shared, lane, mine);
    if (lane == 0 && (int)get_global_id(1) < channels) {
        sums[sums_at + row] = both.x;
        sums[sums_at + batch * channels + row] = both.y;
    }
}

#endif
