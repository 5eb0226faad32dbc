/* Convolutions with one input channel in each group, without matrices.
 *
 *   y[n][o][od][oh][ow] = sum over kd, kh, kw of w[o][kd][kh][kw] * x[n][o / M][od * SD - PD + kd * DD]..   (+ bias[o])
 *
 * Shapes: x [N, G, D, H, W], w [G * M, 1, KD, KH, KW], y [N, G * M, OD, OH, OW], all dense; with fewer axes the first
 * ones have size 1. Dimension 0 walks the last axis, VW elements an item, 1 the other axes and channels, 2 the samples.
 *
 * Kernels:
 *   depthwise         y
 *   depthwise_input   the gradient of x, from that of y; and so the transposed convolution (+ bias[g])
 *   depthwise_weight  made[n][o][kd][kh][kw] = what sample n adds to the gradient of w (dimension 0 walks kernel
 *                     positions, 1 o, 2 the samples)
 */

#ifndef UNIT
#define UNIT 0 /* 1: SW is 1 */
#endif
#ifndef VW
#define VW 1 /* 1, 4, 8 or 16; more than 1 needs UNIT, and vectors loaded from any place */
#endif
#ifndef BIAS
#define BIAS 0
#endif

#define GEOMETRY                                                                                                       \
    int G, int M, int D, int H, int W, int OD, int OH, int OW, int KD, int KH, int KW, int SD, int SH, int SW, int PD, \
        int PH, int PW, int DD, int DH, int DW

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if VW == 1
#define VEC float
#else
#define VEC JOIN(float, VW)
#endif
#if VW == 4
#define EACH_LANE(f) f(0, s0) f(1, s1) f(2, s2) f(3, s3)
#elif VW == 8
#define EACH_LANE(f) f(0, s0) f(1, s1) f(2, s2) f(3, s3) f(4, s4) f(5, s5) f(6, s6) f(7, s7)
#elif VW == 16
#define EACH_LANE(f)                                                                                                   \
    f(0, s0) f(1, s1) f(2, s2) f(3, s3) f(4, s4) f(5, s5) f(6, s6) f(7, s7) f(8, s8) f(9, s9) f(10, sa) f(11, sb)      \
    f(12, sc) f(13, sd) f(14, se) f(15, sf)
#endif

/* VW neighbours of a row of `size` elements, from `at` on; 0 outside. */
static inline VEC neighbours(__global const float *restrict row, int at, int size)
{
#if VW == 1
    return at >= 0 && at < size ? row[at] : 0.0f;
#else
    if (at >= 0 && at + VW <= size)
        return JOIN(vload, VW)(0, row + at);
    VEC found = (VEC)(0.0f);
#define TAKE_LANE(e, s)                                                                                                \
    if (at + e >= 0 && at + e < size)                                                                                  \
        found.s = row[at + e];
    EACH_LANE(TAKE_LANE)
    return found;
#endif
}

/* Write them to a row of `size` elements, from `at` on; none outside. */
static inline void put(__global float *restrict row, int at, int size, VEC given)
{
#if VW == 1
    row[at] = given;
#else
    if (at + VW <= size) {
        JOIN(vstore, VW)(given, 0, row + at);
        return;
    }
#define GIVE_LANE(e, s)                                                                                                \
    if (at + e < size)                                                                                                 \
        row[at + e] = given.s;
    EACH_LANE(GIVE_LANE)
#endif
}

__kernel void depthwise(__global const float *restrict x, int x_at, __global const float *restrict weight,
                        int weight_at,
#if BIAS
                        __global const float *restrict bias, int bias_at,
#endif
                        GEOMETRY, __global float *restrict y, int y_at)
{
    const int ow = (int)get_global_id(0) * VW, line = get_global_id(1), n = get_global_id(2);
    if (ow >= OW || line >= G * M * OD * OH)
        return;
    const int planes = line / OH, oh = line - planes * OH, o = planes / OD, od = planes - o * OD;
    x += x_at + (n * G + o / M) * D * H * W;
    weight += weight_at + o * KD * KH * KW;
    VEC sum = (VEC)(0.0f);
#pragma unroll 1
    for (int kd = 0; kd < KD; kd++) {
        const int d = od * SD - PD + kd * DD, deep = d >= 0 && d < D;
#pragma unroll 1
        for (int kh = 0; kh < KH; kh++) {
            const int h = oh * SH - PH + kh * DH;
            if (!deep || h < 0 || h >= H)
                continue;
            __global const float *row = x + (d * H + h) * W;
#pragma unroll 1
            for (int kw = 0; kw < KW; kw++)
                sum += (VEC)(weight[(kd * KH + kh) * KW + kw]) * neighbours(row, ow * SW - PW + kw * DW, W);
        }
    }
#if BIAS
    sum += (VEC)(bias[bias_at + o]);
#endif
    put(y + y_at + (n * G * M * OD * OH + line) * OW, ow, OW, sum);
}

__kernel void depthwise_input(__global const float *restrict y, int y_at, __global const float *restrict weight,
                              int weight_at,
#if BIAS
                              __global const float *restrict bias, int bias_at,
#endif
                              GEOMETRY, __global float *restrict x, int x_at)
{
    const int w = (int)get_global_id(0) * VW, line = get_global_id(1), n = get_global_id(2);
    if (w >= W || line >= G * D * H)
        return;
    const int planes = line / H, h = line - planes * H, g = planes / D, d = planes - g * D;
    const int L = OD * OH * OW, K = KD * KH * KW;
    y += y_at + (n * G + g) * M * L;
    weight += weight_at + g * M * K;
    VEC sum = (VEC)(0.0f);
#pragma unroll 1
    for (int kd = 0; kd < KD; kd++) {
        const int z = d + PD - kd * DD, od = SD == 1 ? z : z / SD, deep = z >= 0 && od * SD == z && od < OD;
#pragma unroll 1
        for (int kh = 0; kh < KH; kh++) {
            const int v = h + PH - kh * DH, oh = SH == 1 ? v : v / SH;
            if (!deep || v < 0 || oh * SH != v || oh >= OH)
                continue;
            __global const float *rows = y + (od * OH + oh) * OW, *factors = weight + (kd * KH + kh) * KW;
#pragma unroll 1
            for (int kw = 0; kw < KW; kw++) {
                const int u = w + PW - kw * DW;
#if UNIT
#pragma unroll 1
                for (int m = 0; m < M; m++)
                    sum += (VEC)(factors[m * K + kw]) * neighbours(rows + m * L, u, OW);
#else
                const int ow = u / SW;
                if (u >= 0 && ow * SW == u && ow < OW) {
#pragma unroll 1
                    for (int m = 0; m < M; m++)
                        sum += factors[m * K + kw] * rows[m * L + ow];
                }
#endif
            }
        }
    }
#if BIAS
    sum += (VEC)(bias[bias_at + g]);
#endif
    put(x + x_at + (n * G * D * H + line) * W, w, W, sum);
}

static inline float added(VEC v)
{
#if VW == 1
    return v;
#elif VW == 4
    return (v.s0 + v.s1) + (v.s2 + v.s3);
#elif VW == 8
    const float4 half_ = v.lo + v.hi;
    return (half_.s0 + half_.s1) + (half_.s2 + half_.s3);
#else
    const float8 half_ = v.lo + v.hi;
    const float4 quarter = half_.lo + half_.hi;
    return (quarter.s0 + quarter.s1) + (quarter.s2 + quarter.s3);
#endif
}

__kernel void depthwise_weight(__global const float *restrict x, int x_at, __global const float *restrict y, int y_at,
                               GEOMETRY, int samples, __global float *restrict made, int made_at)
{
    const int k = get_global_id(0), o = get_global_id(1), n = get_global_id(2), K = KD * KH * KW;
    if (k >= K || o >= G * M || n >= samples)
        return;
    const int k_rows = k / KW, kw = k - k_rows * KW, kd = k_rows / KH, kh = k_rows - kd * KH;
    x += x_at + (n * G + o / M) * D * H * W;
    y += y_at + (n * G * M + o) * OD * OH * OW;
    VEC sum = (VEC)(0.0f);
#pragma unroll 1
    for (int od = 0; od < OD; od++) {
        const int d = od * SD - PD + kd * DD, deep = d >= 0 && d < D;
#pragma unroll 1
        for (int oh = 0; oh < OH; oh++) {
            const int h = oh * SH - PH + kh * DH;
            if (!deep || h < 0 || h >= H)
                continue;
            __global const float *row = x + (d * H + h) * W, *grads = y + (od * OH + oh) * OW;
#pragma unroll 1
            for (int ow = 0; ow < OW; ow += VW)
                sum += neighbours(grads, ow, OW) * neighbours(row, ow * SW - PW + kw * DW, W);
        }
    }
    made[made_at + (n * G * M + o) * K + k] = added(sum);
}
