/* Matrix product on register tiles, without local memory.
 *
 *   c[i][m][n] = sum over k of a[i][m][k] * b[i][k][n]   (+ bias[i][m][n])
 *
 * Shapes: a [batch, M, K], b [batch, K, N], c [batch, M, N] by strides; one item makes a tile of TM x TN elements,
 * TN = NV * VW. Dimension 0 walks tiles of columns, 1 tiles of rows, 2 the batch (and the parts of K, see SPLIT).
 *
 * An operand is packed (see pack.cl: a [batch, panels, K, TM], b [batch, panels, K, TN], zero padded) or read in place:
 *   A_PACKED 0   a is read by a_row and a_k, one scalar for each row and k
 *   B_PACKED 0   b's columns follow one another and N >= TN: rows of b are read as vectors from any place
 *                (on a GPU: b_at, the strides and N are multiples of VW)
 *
 * Kernels:
 *   gemm       the product, summed over from <= k < to
 *   gemm_sum   c = the sum of the parts that gemm made with SPLIT, in order, plus the bias
 * c is written as vectors if c_n is 1, STORE_VECTORS is set and, on a GPU, c_at and the strides are multiples of VW.
 */

#ifndef VW
#define VW 4 /* floats of a vector: 4, 8 or 16 */
#endif
#ifndef NV
#define NV 2 /* vectors across a tile */
#endif
#ifndef TM
#define TM 8 /* rows of a tile */
#endif
#ifndef A_PACKED
#define A_PACKED 1
#endif
#ifndef A_VECTORS
#define A_VECTORS 1 /* load four rows of a at once (TM is a multiple of 4), as VLIW cards want it */
#endif
#ifndef B_PACKED
#define B_PACKED 1
#endif
#ifndef REPEATS
#define REPEATS 0 /* 1: a has only `repeat` matrices, which the batch uses over and over; 2: b has */
#endif
#ifndef EDGE
#define EDGE 1 /* 0: TM divides M and TN divides N; 2: as 1, with less code, for devices with a stack (CPUs) */
#endif
#ifndef STORE_VECTORS
#define STORE_VECTORS 1
#endif
#ifndef BIAS
#define BIAS 0 /* 1: one for each column, 2: one for each row, 3: one for each element */
#endif
#ifndef MORE
#define MORE 0 /* 1: the sum is added to what c holds */
#endif
#ifndef SPLIT
#define SPLIT 0 /* 1: each of `parts` items of dimension 2 sums its own part of K into c + part * c_part */
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define VEC JOIN(float, VW)
#define VLOAD JOIN(vload, VW)
#define VSTORE JOIN(vstore, VW)
#define TN (NV * VW)

/* Packed on CPUs, places need not be widened to addresses in each step, and a turn of the loop is four steps of k: what
   is not a multiply-add takes its share of a core that two threads may have to share. */
#if VW > 4 && A_PACKED && B_PACKED
#define PLACE long
#else
#define PLACE int
#endif

/* Not mad(): PoCL makes two instructions of mad() and one of this; the r600 makes one of either. */
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))

#if VW == 4
#define EACH_LANE(DO) DO(0, s0) DO(1, s1) DO(2, s2) DO(3, s3)
#define GATHER(f) (VEC)(f(0), f(1), f(2), f(3))
#elif VW == 8
#define EACH_LANE(DO) DO(0, s0) DO(1, s1) DO(2, s2) DO(3, s3) DO(4, s4) DO(5, s5) DO(6, s6) DO(7, s7)
#define GATHER(f) (VEC)(f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7))
#else
#define EACH_LANE(DO)                                                                                                  \
    DO(0, s0) DO(1, s1) DO(2, s2) DO(3, s3) DO(4, s4) DO(5, s5) DO(6, s6) DO(7, s7) DO(8, s8) DO(9, s9) DO(10, sa)     \
    DO(11, sb) DO(12, sc) DO(13, sd) DO(14, se) DO(15, sf)
#define GATHER(f)                                                                                                      \
    (VEC)(f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15))
#endif

__kernel void gemm(__global const float *restrict a, int a_at, int a_batch, int a_row, int a_k,
                   __global const float *restrict b, int b_at, int b_batch, int b_k,
#if REPEATS
                   int repeat,
#endif
#if BIAS
                   __global const float *restrict bias, int bias_at, int bias_batch, int bias_m, int bias_n,
#endif
                   __global float *restrict c, int c_at, int c_batch, int c_m, int c_n,
#if SPLIT
                   int parts, int part_k, int c_part,
#endif
                   int M, int N, int K, int from, int to)
{
    const int column = (int)get_global_id(0) * TN, row = (int)get_global_id(1) * TM;
    if (column >= N || row >= M)
        return;
#if SPLIT
    const int batch = (int)get_global_id(2) / parts, part = (int)get_global_id(2) - batch * parts;
    const int first = from + part * part_k, stop = min(first + part_k, to);
    c += part * c_part;
#else
    const int batch = get_global_id(2), first = from, stop = to;
#endif
    int a_own = batch, b_own = batch;
#if REPEATS == 1
    a_own %= repeat;
#elif REPEATS == 2
    b_own %= repeat;
#endif
    a += a_at + a_own * a_batch;
    b += b_at + b_own * b_batch;
    c += c_at + batch * c_batch;
#if A_PACKED
    a += row * K;
#if A_VECTORS
    __global const float4 *restrict a4 = (__global const float4 *)a;
#endif
#else
    __global const float *lines[TM];
#pragma unroll
    for (int i = 0; i < TM; i++)
        lines[i] = a + min(row + i, M - 1) * a_row;
#endif
#if B_PACKED
    __global const VEC *restrict columns = (__global const VEC *)(b + column * K);
#elif EDGE
    b += min(column, N - TN); /* the last tile moves back to where its columns are; see `lag` */
#else
    b += column;
#endif

    VEC sum[TM][NV];
#pragma unroll
    for (int i = 0; i < TM; i++) {
#pragma unroll
        for (int j = 0; j < NV; j++)
            sum[i][j] = (VEC)(0.0f);
    }

#if VW > 4 && A_PACKED && B_PACKED
#pragma unroll 4
#else
#pragma unroll 1
#endif
    for (PLACE k = first; k < stop; k++) {
        VEC right[NV];
#pragma unroll
        for (int j = 0; j < NV; j++)
#if B_PACKED
            right[j] = columns[k * NV + j];
#else
            right[j] = VLOAD(j, b + k * b_k);
#endif
#if A_PACKED && A_VECTORS
        float4 left[TM / 4];
#pragma unroll
        for (int i = 0; i < TM / 4; i++)
            left[i] = a4[k * (TM / 4) + i];
#pragma unroll
        for (int i = 0; i < TM / 4; i++) {
#pragma unroll
            for (int j = 0; j < NV; j++) {
                sum[4 * i][j] = MULTIPLY_ADD((VEC)(left[i].s0), right[j], sum[4 * i][j]);
                sum[4 * i + 1][j] = MULTIPLY_ADD((VEC)(left[i].s1), right[j], sum[4 * i + 1][j]);
                sum[4 * i + 2][j] = MULTIPLY_ADD((VEC)(left[i].s2), right[j], sum[4 * i + 2][j]);
                sum[4 * i + 3][j] = MULTIPLY_ADD((VEC)(left[i].s3), right[j], sum[4 * i + 3][j]);
            }
        }
#else
#pragma unroll
        for (int i = 0; i < TM; i++) {
#if A_PACKED
            const float left = a[k * TM + i];
#else
            const float left = lines[i][k * a_k];
#endif
#pragma unroll
            for (int j = 0; j < NV; j++)
                sum[i][j] = MULTIPLY_ADD((VEC)(left), right[j], sum[i][j]);
        }
#endif
    }

#if BIAS
    bias += bias_at + batch * bias_batch;
#pragma unroll
    for (int j = 0; j < NV; j++) {
#if EDGE && !B_PACKED
        const int n = min(column, N - TN) + j * VW;
#else
        const int n = column + j * VW;
#endif
#define BIAS_LANE(e) line[min(n + e, N - 1) * bias_n]
#if BIAS == 1
        __global const float *line = bias;
        const VEC shared = GATHER(BIAS_LANE);
#endif
#pragma unroll
        for (int i = 0; i < TM; i++) {
#if BIAS == 1
            sum[i][j] += shared;
#elif BIAS == 2
            sum[i][j] += (VEC)(bias[min(row + i, M - 1) * bias_m]);
#else
            __global const float *line = bias + min(row + i, M - 1) * bias_m;
            sum[i][j] += GATHER(BIAS_LANE);
#endif
        }
    }
#endif

#if EDGE && !B_PACKED
    const int lag = max(column - (N - TN), 0); /* columns that the tile before this one writes */
    c += row * c_m + (column - lag) * c_n;
#else
    const int lag = 0;
    c += row * c_m + column * c_n;
#endif
#if EDGE
    const int rows = min(M - row, TM), stop_column = min(N - column + lag, TN);
    const int inside = (rows == TM) & (lag == 0) & (stop_column == TN);
#else
    const int inside = 1;
#endif
#if STORE_VECTORS
    if (inside) {
#pragma unroll
        for (int i = 0; i < TM; i++) {
#pragma unroll
            for (int j = 0; j < NV; j++)
#if MORE
                VSTORE(sum[i][j] + VLOAD(j, c + i * c_m), j, c + i * c_m);
#else
                VSTORE(sum[i][j], j, c + i * c_m);
#endif
        }
        return;
    }
#endif
#if MORE
#define GIVE(place, value) place += (value)
#else
#define GIVE(place, value) place = (value)
#endif
#if EDGE == 2
    float tile[TM * TN];
#pragma unroll
    for (int i = 0; i < TM; i++) {
#pragma unroll
        for (int j = 0; j < NV; j++)
            VSTORE(sum[i][j], i * NV + j, tile);
    }
#pragma unroll 1
    for (int n = lag; n < stop_column; n++) {
#pragma unroll 1
        for (int i = 0; i < rows; i++)
            GIVE(c[i * c_m + n * c_n], tile[i * TN + n]);
    }
#elif EDGE || !STORE_VECTORS
#pragma unroll
    for (int i = 0; i < TM; i++) {
#pragma unroll
        for (int j = 0; j < NV; j++) {
#if EDGE
#define STORE_LANE(e, s)                                                                                               \
    if ((i < rows) & (j * VW + e >= lag) & (j * VW + e < stop_column))                                                 \
        GIVE(c[i * c_m + (j * VW + e) * c_n], sum[i][j].s);
#else
#define STORE_LANE(e, s) GIVE(c[i * c_m + (j * VW + e) * c_n], sum[i][j].s);
#endif
            EACH_LANE(STORE_LANE)
        }
    }
#endif
}

__kernel void gemm_sum(__global const float *restrict sums, int sums_at, int parts, int part_size,
#if BIAS
                       __global const float *restrict bias, int bias_at, int bias_batch, int bias_m, int bias_n,
#endif
                       __global float *restrict c, int c_at, int c_batch, int c_m, int c_n, int M, int N)
{
    const int n = get_global_id(0), m = get_global_id(1), batch = get_global_id(2);
    if (n >= N || m >= M)
        return;
    sums += sums_at + (batch * M + m) * N + n;
    float sum = sums[0];
#pragma unroll 2
    for (int part = 1; part < parts; part++)
        sum += sums[part * part_size];
#if BIAS
    sum += bias[bias_at + batch * bias_batch + m * bias_m + n * bias_n];
#endif
    c[c_at + batch * c_batch + m * c_m + n * c_n] = sum;
}
