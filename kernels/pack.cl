/* Packing: a matrix of any two strides becomes panels that gemm.cl reads without strides and without edges.
 *
 *   panels[b][p][k][t] = x[b][p * T + t][k]    for p * T + t < rows, otherwise 0
 *
 * Shapes: x [batch, rows, K] by strides, panels [batch, ceil(rows / T), K, T] dense and aligned.
 * The rows of x are the rows of the left operand of a product, or the columns of the right one.
 *
 * Kernels (dimension 0 walks k, 1 panels, 2 the batch):
 *   pack         any strides
 *   pack_rows    row_stride is 1: whole vectors are copied, STEPS k by an item; K walks one level
 *   pack_inner   k_stride is 1: four k by an item, turned in registers
 * With TWO_LEVELS k = outer * inner_size + inner walks two strides; pack_inner then needs an inner_size that is a
 * multiple of 4. The last two kernels load vectors: a device that cannot load them from any place (GPUs) needs x_at and
 * the strides, other than the 1, to be multiples of 4.
 */

#ifndef T
#define T 8 /* rows of a panel; even for the last two kernels */
#endif
#ifndef STEPS
#define STEPS 1
#endif
#ifndef TWO_LEVELS
#define TWO_LEVELS 0
#endif

#define FOURS (T / 4)
#if T % 4 == 2
#define PAIR (T - 2)
#endif

#if TWO_LEVELS
#define PLACE_OF_K (k / inner_size * outer_stride + k % inner_size * k_stride)
#else
#define PLACE_OF_K (k * k_stride)
#endif

__kernel void pack(__global const float *restrict x, int x_at, int rows, int K, int row_stride, int inner_size,
                   int outer_stride, int k_stride, int batch_stride, __global float *restrict panels, int panels_at)
{
    const int k = get_global_id(0), panel = get_global_id(1), batch = get_global_id(2);
    const int count = (rows + T - 1) / T;
    if (k >= K || panel >= count)
        return;
    x += x_at + batch * batch_stride + PLACE_OF_K + panel * T * row_stride;
    panels += panels_at + ((batch * count + panel) * K + k) * T;
    const int left = rows - panel * T;
#pragma unroll
    for (int t = 0; t < T; t++)
        panels[t] = t < left ? x[t * row_stride] : 0.0f;
}

__kernel void pack_rows(__global const float *restrict x, int x_at, int rows, int K, int row_stride, int inner_size,
                        int outer_stride, int k_stride, int batch_stride, __global float *restrict panels,
                        int panels_at)
{
    const int k = (int)get_global_id(0) * STEPS, panel = get_global_id(1), batch = get_global_id(2);
    const int count = (rows + T - 1) / T;
    if (k >= K || panel >= count)
        return;
    x += x_at + batch * batch_stride + k * k_stride + panel * T;
    panels += panels_at + ((batch * count + panel) * K + k) * T;
    const int left = rows - panel * T, steps = min(STEPS, K - k);
    if (left >= T && steps == STEPS) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int t = 0; t < FOURS; t++)
                vstore4(vload4(t, x + step * k_stride), t, panels + step * T);
#ifdef PAIR
            vstore2(vload2(0, x + step * k_stride + PAIR), 0, panels + step * T + PAIR);
#endif
        }
        return;
    }
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
#pragma unroll
        for (int t = 0; t < T; t++)
            panels[step * T + t] = t < left ? x[step * k_stride + t] : 0.0f;
    }
}

__kernel void pack_inner(__global const float *restrict x, int x_at, int rows, int K, int row_stride, int inner_size,
                         int outer_stride, int k_stride, int batch_stride, __global float *restrict panels,
                         int panels_at)
{
    const int k = 4 * (int)get_global_id(0), panel = get_global_id(1), batch = get_global_id(2);
    const int count = (rows + T - 1) / T;
    if (k >= K || panel >= count)
        return;
    x += x_at + batch * batch_stride + PLACE_OF_K + panel * T * row_stride;
    panels += panels_at + ((batch * count + panel) * K + k) * T;
    const int left = rows - panel * T;
    if (left >= T && k + 4 <= K) {
#pragma unroll
        for (int t = 0; t < FOURS; t++) {
            const float4 a = vload4(0, x + (4 * t) * row_stride), b = vload4(0, x + (4 * t + 1) * row_stride);
            const float4 c = vload4(0, x + (4 * t + 2) * row_stride), d = vload4(0, x + (4 * t + 3) * row_stride);
            vstore4((float4)(a.s0, b.s0, c.s0, d.s0), 0, panels + 4 * t);
            vstore4((float4)(a.s1, b.s1, c.s1, d.s1), 0, panels + T + 4 * t);
            vstore4((float4)(a.s2, b.s2, c.s2, d.s2), 0, panels + 2 * T + 4 * t);
            vstore4((float4)(a.s3, b.s3, c.s3, d.s3), 0, panels + 3 * T + 4 * t);
        }
#ifdef PAIR
        const float4 a = vload4(0, x + PAIR * row_stride), b = vload4(0, x + (PAIR + 1) * row_stride);
        vstore2((float2)(a.s0, b.s0), 0, panels + PAIR);
        vstore2((float2)(a.s1, b.s1), 0, panels + T + PAIR);
        vstore2((float2)(a.s2, b.s2), 0, panels + 2 * T + PAIR);
        vstore2((float2)(a.s3, b.s3), 0, panels + 3 * T + PAIR);
#endif
    } else {
        const int last = min(4, K - k);
#pragma unroll 1
        for (int j = 0; j < last; j++) {
#pragma unroll
            for (int t = 0; t < T; t++)
                panels[j * T + t] = t < left ? x[t * row_stride + j] : 0.0f;
        }
    }
}
