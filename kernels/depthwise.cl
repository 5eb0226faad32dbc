/* Convolutions with one input channel in each group, without matrices.
 *
 *   y[n][o][od][oh][ow] = sum over kd, kh, kw of w[o][kd][kh][kw] * x[n][o / M][od * SD - PD + kd * DD]..   (+ bias[o])
 *
 * Shapes: x [N, G, D, H, W], w [G * M, 1, KD, KH, KW], y [N, G * M, OD, OH, OW], all dense; with fewer axes the first
 * ones have size 1. Dimension 0 walks the last axis, 1 the other axes and channels, 2 the samples.
 *
 * Kernels:
 *   depthwise         y
 *   depthwise_input   the gradient of x, from that of y; and so the transposed convolution (+ bias[g])
 */

#ifndef BIAS
#define BIAS 0
#endif

#define GEOMETRY                                                                                                       \
    int G, int M, int D, int H, int W, int OD, int OH, int OW, int KD, int KH, int KW, int SD, int SH, int SW, int PD, \
        int PH, int PW, int DD, int DH, int DW

__kernel void depthwise(__global const float *restrict x, int x_at, __global const float *restrict weight,
                        int weight_at,
#if BIAS
                        __global const float *restrict bias, int bias_at,
#endif
                        GEOMETRY, __global float *restrict y, int y_at)
{
    const int ow = get_global_id(0), line = get_global_id(1), n = get_global_id(2);
    if (ow >= OW || line >= G * M * OD * OH)
        return;
    const int planes = line / OH, oh = line - planes * OH, o = planes / OD, od = planes - o * OD;
    x += x_at + (n * G + o / M) * D * H * W;
    weight += weight_at + o * KD * KH * KW;
    float sum = 0.0f;
#pragma unroll 1
    for (int kd = 0; kd < KD; kd++) {
        const int d = od * SD - PD + kd * DD, deep = d >= 0 && d < D;
#pragma unroll 1
        for (int kh = 0; kh < KH; kh++) {
            const int h = oh * SH - PH + kh * DH, high = deep && h >= 0 && h < H;
#pragma unroll 1
            for (int kw = 0; kw < KW; kw++) {
                const int w = ow * SW - PW + kw * DW;
                if (high && w >= 0 && w < W)
                    sum += weight[(kd * KH + kh) * KW + kw] * x[(d * H + h) * W + w];
            }
        }
    }
#if BIAS
    sum += bias[bias_at + o];
#endif
    y[y_at + (n * G * M * OD * OH + line) * OW + ow] = sum;
}

__kernel void depthwise_input(__global const float *restrict y, int y_at, __global const float *restrict weight,
                              int weight_at,
#if BIAS
                              __global const float *restrict bias, int bias_at,
#endif
                              GEOMETRY, __global float *restrict x, int x_at)
{
    const int w = get_global_id(0), line = get_global_id(1), n = get_global_id(2);
    if (w >= W || line >= G * D * H)
        return;
    const int planes = line / H, h = line - planes * H, g = planes / D, d = planes - g * D;
    const int L = OD * OH * OW, K = KD * KH * KW;
    y += y_at + (n * G + g) * M * L;
    weight += weight_at + g * M * K;
    float sum = 0.0f;
#pragma unroll 1
    for (int kd = 0; kd < KD; kd++) {
        const int z = d + PD - kd * DD, od = z / SD, deep = z >= 0 && od * SD == z && od < OD;
#pragma unroll 1
        for (int kh = 0; kh < KH; kh++) {
            const int v = h + PH - kh * DH, oh = v / SH, high = deep && v >= 0 && oh * SH == v && oh < OH;
#pragma unroll 1
            for (int kw = 0; kw < KW; kw++) {
                const int u = w + PW - kw * DW, ow = u / SW;
                if (high && u >= 0 && ow * SW == u && ow < OW) {
                    const int at = (kd * KH + kh) * KW + kw, l = (od * OH + oh) * OW + ow;
#pragma unroll 1
                    for (int m = 0; m < M; m++)
                        sum += weight[m * K + at] * y[m * L + l];
                }
            }
        }
    }
#if BIAS
    sum += bias[bias_at + g];
#endif
    x[x_at + (n * G * D * H + line) * W + w] = sum;
}
