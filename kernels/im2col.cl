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
 * samples only, by offsets. Dimension 0 walks k, n * L + l or w; the last two take VW at once.
 */

#ifndef T
#define T 8 /* height of a panel */
#endif
#ifndef COPIES
#define COPIES 0 /* 1: vectors may be loaded from any place (CPUs) */
#endif
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
    int C, int D, int H, int W, int OD, int OH, int OW, int KD, int KH, int KW, int SD, int SH, int SW, int PD,        \
        int PH, int PW, int DD, int DH, int DW

__kernel void windows(__global const float *restrict x, int x_at, GEOMETRY, int first, int L,
                      __global float *restrict panels, int panels_at)
{
    const int k = get_global_id(0), panel = get_global_id(1), b = get_global_id(2);
    const int count = (L + T - 1) / T, K = C * KD * KH * KW;
    if (k >= K || panel >= count)
        return;
    const int k_rows = k / KW, kw = k - k_rows * KW, k_planes = k_rows / KH, kh = k_rows - k_planes * KH;
    const int c = k_planes / KD, kd = k_planes - c * KD;
    x += x_at + (b * C + c) * D * H * W;
    panels += panels_at + ((b * count + panel) * K + k) * T;
    const int l = first + panel * T, rows = l / OW;
    const int shift = kw * DW - PW, left = min(T, L - panel * T);
    int ow = l - rows * OW, od = rows / OH, oh = rows - od * OH;
    int d = od * SD - PD + kd * DD, h = oh * SH - PH + kh * DH;
#pragma unroll 1
    for (int t = 0; t < left;) {
        /* The positions that lie in one row of y, and with it in one row of x. */
        const int stop = min(left, t + OW - ow), inside = d >= 0 && d < D && h >= 0 && h < H;
        __global const float *row = x + (d * H + h) * W;
        int w = ow * SW + shift;
#if COPIES && T % 4 == 0
        if (inside && SW == 1 && stop - t == T && w >= 0 && w + T <= W) {
#pragma unroll
            for (int i = 0; i < T / 4; i++)
                vstore4(vload4(i, row + w), i, panels);
            return;
        }
#endif
#pragma unroll 1
        for (; t < stop; t++, w += SW)
            panels[t] = inside && w >= 0 && w < W ? row[w] : 0.0f;
        ow = 0;
        h += SH;
        if (++oh == OH) {
            oh = 0;
            h = kh * DH - PH;
            d += SD;
        }
    }
#pragma unroll 1
    for (int t = left; t < T; t++)
        panels[t] = 0.0f;
}

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

__kernel void windows_turned(__global const float *restrict x, int x_at, GEOMETRY, int first, int L,
                             int groups, int samples, __global float *restrict panels, int panels_at)
{
    const int begin = (int)get_global_id(0) * VW, panel = get_global_id(1), g = get_global_id(2);
    const int K = C * KD * KH * KW, count = (K + T - 1) / T;
    if (begin >= samples * L || panel >= count)
        return;
    panels += panels_at + (g * count + panel) * samples * L * T;
    const int k = panel * T, k_rows = k / KW, k_planes = k_rows / KH, left = min(T, K - k);
    const int kw0 = k - k_rows * KW, kh0 = k_rows - k_planes * KH, c0 = k_planes / KD, kd0 = k_planes - c0 * KD;
    const int end = min(begin + VW, samples * L);
#pragma unroll 1
    for (int j = begin; j < end;) {
        const int n = j / L, part = j - n * L, l = first + part;
        const int rows = l / OW, ow = l - rows * OW, od = rows / OH, oh = rows - od * OH;
        __global const float *sample = x + x_at + (n * groups + g) * C * D * H * W;
        __global float *line = panels + j * T;
        int kw = kw0, kh = kh0, kd = kd0, c = c0;
        int d = od * SD - PD + kd * DD, h = oh * SH - PH + kh * DH, w = ow * SW - PW + kw * DW;
        /* Positions at once: those of one row of y have their elements side by side. */
        const int many = VW > 1 && part + VW <= L && ow + VW <= OW && j + VW <= end;
#pragma unroll 1
        for (int t = 0; t < left;) {
            /* The elements that lie in one row of x. */
            const int stop = min(left, t + KW - kw), inside = d >= 0 && d < D && h >= 0 && h < H;
            __global const float *row = sample + ((c * D + d) * H + h) * W;
#if VW > 1
            if (many) {
#pragma unroll 1
                for (; t < stop; t++, w += DW) {
                    const VEC found = inside ? neighbours(row, w, W) : (VEC)(0.0f);
#define GIVE_LINE(e, s) line[e * T + t] = found.s;
                    EACH_LANE(GIVE_LINE)
                }
            }
#endif
#pragma unroll 1
            for (; t < stop; t++, w += DW)
                line[t] = inside && w >= 0 && w < W ? row[w] : 0.0f;
            kw = 0;
            w = ow * SW - PW;
            h += DH;
            if (++kh == KH) {
                kh = 0;
                h = oh * SH - PH;
                d += DD;
                if (++kd == KD) {
                    kd = 0;
                    d = od * SD - PD;
                    c++;
                }
            }
        }
        const int done = many ? VW : 1;
#pragma unroll 1
        for (int t = left; t < T; t++) {
#pragma unroll 1
            for (int e = 0; e < done; e++)
                line[e * T + t] = 0.0f;
        }
        j += done;
    }
}

__kernel void columns_added(__global const float *restrict columns, int columns_at, GEOMETRY, int groups,
#if BIAS
                            __global const float *restrict bias, int bias_at,
#endif
                            __global float *restrict x, int x_at)
{
    const int w = (int)get_global_id(0) * VW, line = get_global_id(1), b = get_global_id(2);
    if (w >= W || line >= C * D * H)
        return;
    const int planes = line / H, h = line - planes * H, c = planes / D, d = planes - c * D;
    const int L = OD * OH * OW;
    columns += columns_at + (b * C + c) * KD * KH * KW * L;
    VEC sum = (VEC)(0.0f);
#pragma unroll 1
    for (int kd = 0; kd < KD; kd++) {
        const int z = d + PD - kd * DD, od = SD == 1 ? z : z / SD, deep = z >= 0 && od * SD == z && od < OD;
#pragma unroll 1
        for (int kh = 0; kh < KH; kh++) {
            const int y = h + PH - kh * DH, oh = SH == 1 ? y : y / SH;
            if (!deep || y < 0 || oh * SH != y || oh >= OH)
                continue;
            __global const float *row = columns + (kd * KH + kh) * KW * L + (od * OH + oh) * OW;
#pragma unroll 1
            for (int kw = 0; kw < KW; kw++, row += L) {
                const int v = w + PW - kw * DW;
#if UNIT
                sum += neighbours(row, v, OW);
#else
                const int ow = v / SW;
                if (v >= 0 && ow * SW == v && ow < OW)
                    sum += row[ow];
#endif
            }
        }
    }
#if BIAS
    sum += (VEC)(bias[bias_at + b % groups * C + c]);
#endif
    x += x_at + (b * C * D * H + line) * W + w;
#if VW == 1
    x[0] = sum;
#else
    if (w + VW <= W) {
        JOIN(vstore, VW)(sum, 0, x);
        return;
    }
#define GIVE_LANE(e, s)                                                                                                \
    if (w + e < W)                                                                                                     \
        x[e] = sum.s;
    EACH_LANE(GIVE_LANE)
#endif
}
