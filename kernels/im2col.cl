/* The windows of a convolution as matrices, and back.
 *
 * Shapes: x [N, groups * C, D, H, W], y [N, groups * O, OD, OH, OW], kernel [KD, KH, KW]; with fewer axes the first
 * ones have size 1. A window is counted by k = ((c * KD + kd) * KH + kh) * KW + kw, an output position by
 * l = (od * OH + oh) * OW + ow. The element of x that k and l meet is
 *
 *   x[n][g * C + c][od * SD - PD + kd * DD][oh * SH - PH + kh * DH][ow * SW - PW + kw * DW]    (0 outside)
 *
 * The panels are those of pack.cl, and x and the columns are dense. b = n * groups + g.
 *
 * Kernels:
 *   windows          panels[b][p][k][t] = element(k, first + p * T + t)           right operand, [K, L] of each b
 *   windows_turned   panels[g][p][n * L + l][t] = element(p * T + t, first + l)   right operand, [N * L, K] of each g
 *   columns_added    x[n][g * C + c][d][h][w] = sum over the k and l that meet it, in order of k, of columns[b][k][l]
 *                    (+ bias[g * C + c])
 * The L of the first two is the number of positions from `first` on that are wanted. All may be given some of the
 * samples only, by offsets. Dimension 0 walks k, n * L + l or w.
 */

#ifndef T
#define T 8 /* height of a panel */
#endif
#ifndef BIAS
#define BIAS 0
#endif

#define GEOMETRY                                                                                                       \
    int C, int D, int H, int W, int OD, int OH, int OW, int KD, int KH, int KW, int SD, int SH, int SW, int PD,        \
        int PH, int PW, int DD, int DH, int DW

__kernel void windows(__global const float *restrict x, int x_at, GEOMETRY, int first, int L,
                      __global float *restrict panels, int panels_at)
{
    const int k = get_global_id(0), panel = get_global_id(1), b = get_global_id(2);
    const int count = (L + T - 1) / T, K = C * KD * KH * KW;
    if (k >= K || panel >= count)
        return;
    const int kw = k % KW, k_rows = k / KW, kh = k_rows % KH, k_planes = k_rows / KH, kd = k_planes % KD;
    const int c = k_planes / KD;
    x += x_at + (b * C + c) * D * H * W;
    panels += panels_at + ((b * count + panel) * K + k) * T;
    const int l = first + panel * T, rows = l / OW;
    int ow = l - rows * OW, od = rows / OH, oh = rows - od * OH;
    const int shift = kw * DW - PW;
    int d = od * SD - PD + kd * DD, h = oh * SH - PH + kh * DH, left = L - panel * T;
#pragma unroll 1
    for (int t = 0; t < T;) {
        /* The positions that lie in one row of y. */
        const int stop = min(T, t + OW - ow), inside = d >= 0 && d < D && h >= 0 && h < H;
        __global const float *row = x + (d * H + h) * W;
#pragma unroll 1
        for (; t < stop; t++, ow++) {
            const int w = ow * SW + shift;
            panels[t] = inside && t < left && w >= 0 && w < W ? row[w] : 0.0f;
        }
        ow = 0;
        h += SH;
        if (++oh == OH) {
            oh = 0;
            h = kh * DH - PH;
            d += SD;
        }
    }
}

__kernel void windows_turned(__global const float *restrict x, int x_at, GEOMETRY, int first, int L,
                             int groups, int samples, __global float *restrict panels, int panels_at)
{
    const int j = get_global_id(0), panel = get_global_id(1), g = get_global_id(2);
    const int K = C * KD * KH * KW, count = (K + T - 1) / T;
    if (j >= samples * L || panel >= count)
        return;
    const int n = j / L, l = first + j - n * L, rows = l / OW, ow = l - rows * OW, od = rows / OH, oh = rows - od * OH;
    const int k = panel * T, k_rows = k / KW, k_planes = k_rows / KH;
    int kw = k - k_rows * KW, kh = k_rows - k_planes * KH, c = k_planes / KD, kd = k_planes - c * KD;
    x += x_at + (n * groups + g) * C * D * H * W;
    panels += panels_at + ((g * count + panel) * samples * L + j) * T;
    const int d0 = od * SD - PD, h0 = oh * SH - PH, w0 = ow * SW - PW;
#pragma unroll 1
    for (int t = 0; t < T; t++) {
        const int d = d0 + kd * DD, h = h0 + kh * DH, w = w0 + kw * DW;
        const int inside = c < C && d >= 0 && d < D && h >= 0 && h < H && w >= 0 && w < W;
        panels[t] = inside ? x[((c * D + d) * H + h) * W + w] : 0.0f;
        if (++kw == KW) {
            kw = 0;
            if (++kh == KH) {
                kh = 0;
                if (++kd == KD) {
                    kd = 0;
                    c++;
                }
            }
        }
    }
}

__kernel void columns_added(__global const float *restrict columns, int columns_at, GEOMETRY, int groups,
#if BIAS
                            __global const float *restrict bias, int bias_at,
#endif
                            __global float *restrict x, int x_at)
{
    const int w = get_global_id(0), line = get_global_id(1), b = get_global_id(2);
    if (w >= W || line >= C * D * H)
        return;
    const int planes = line / H, h = line - planes * H, c = planes / D, d = planes - c * D;
    const int L = OD * OH * OW;
    columns += columns_at + (b * C + c) * KD * KH * KW * L;
    float sum = 0.0f;
#pragma unroll 1
    for (int kd = 0; kd < KD; kd++) {
        const int z = d + PD - kd * DD, od = z / SD, deep = z >= 0 && od * SD == z && od < OD;
#pragma unroll 1
        for (int kh = 0; kh < KH; kh++) {
            const int y = h + PH - kh * DH, oh = y / SH, high = deep && y >= 0 && oh * SH == y && oh < OH;
#pragma unroll 1
            for (int kw = 0; kw < KW; kw++) {
                const int v = w + PW - kw * DW, ow = v / SW;
                if (high && v >= 0 && ow * SW == v && ow < OW)
                    sum += columns[((kd * KH + kh) * KW + kw) * L + (od * OH + oh) * OW + ow];
            }
        }
    }
#if BIAS
    sum += bias[bias_at + b % groups * C + c];
#endif
    x[x_at + (b * C * D * H + line) * W + w] = sum;
}
