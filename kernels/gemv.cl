/* Product of a matrix with a vector, where the matrix's rows lie along k.
 *
 *   c[b][n] = sum over k of w[b][n][k] * x[b][k]   (+ bias[b][n])
 *
 * Shapes: w [batch, N, K] by strides, x [batch, K] with its elements one after the other, c [batch, N] by strides.
 * Dimension 2 walks the batch (and the parts of K, see SPLIT of gemm.cl; gemm_sum of gemm.cl sums them up).
 *
 * Kernels:
 *   gemv_item    one item for one n (dimension 0): four vectors of partial sums, added in a fixed order
 *   gemv_group   LANES items (dimension 0) for one n (dimension 1), ROWS rows in a work-group; each item sums every
 *                LANES-th vector, then they meet in local memory
 * w's elements are read as vectors of VW if w_k is 1 (on a GPU: and w_at, w_n, w_batch, x_at and part_k are multiples
 * of VW). With VW 1 any w_k will do.
 */

#ifndef VW
#define VW 4 /* 1, 4, 8 or 16 */
#endif
#ifndef LANES
#define LANES 64 /* a power of 2 */
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if VW == 1
#define VEC float
#define LOAD_W(i) w[(i) * w_k]
#define LOAD_X(i) x[i]
#else
#define VEC JOIN(float, VW)
#define LOAD_W(i) JOIN(vload, VW)(i, w)
#define LOAD_X(i) JOIN(vload, VW)(i, x)
#endif

static inline float added4(float4 v)
{
    return (v.s0 + v.s1) + (v.s2 + v.s3);
}

static inline float added(VEC v)
{
#if VW == 1
    return v;
#elif VW == 4
    return added4(v);
#elif VW == 8
    return added4(v.lo + v.hi);
#else
    const float8 half_ = v.lo + v.hi;
    return added4(half_.lo + half_.hi);
#endif
}

#if BIAS
#define BIAS_PARAMETERS __global const float *restrict bias, int bias_at, int bias_batch, int bias_n,
#define BIASED(sum) ((sum) + bias[bias_at + batch * bias_batch + n * bias_n])
#else
#define BIAS_PARAMETERS
#define BIASED(sum) (sum)
#endif
#if SPLIT
#define SPLIT_PARAMETERS int parts, int part_k, int c_part,
#define FIND_PART                                                                                                      \
    const int batch = (int)get_global_id(2) / parts, part = (int)get_global_id(2) - batch * parts;                     \
    const int first = part * part_k, length = min(part_k, K - first);                                                  \
    c += part * c_part;
#else
#define SPLIT_PARAMETERS
#define FIND_PART const int batch = get_global_id(2), first = 0, length = K;
#endif

__kernel void gemv_item(__global const float *restrict w, int w_at, int w_batch, int w_n, int w_k,
                        __global const float *restrict x, int x_at, int x_batch, BIAS_PARAMETERS
                        __global float *restrict c, int c_at, int c_batch, int c_n, SPLIT_PARAMETERS int N, int K)
{
    const int n = get_global_id(0);
    if (n >= N)
        return;
    FIND_PART
    w += w_at + batch * w_batch + n * w_n + first * w_k;
    x += x_at + batch * x_batch + first;
    const int vectors = length / VW, fours = vectors / 4;
    VEC sum0 = (VEC)(0.0f), sum1 = sum0, sum2 = sum0, sum3 = sum0;
#pragma unroll 1
    for (int i = 0; i < fours; i++) {
        sum0 += LOAD_W(4 * i) * LOAD_X(4 * i);
        sum1 += LOAD_W(4 * i + 1) * LOAD_X(4 * i + 1);
        sum2 += LOAD_W(4 * i + 2) * LOAD_X(4 * i + 2);
        sum3 += LOAD_W(4 * i + 3) * LOAD_X(4 * i + 3);
    }
#pragma unroll 1
    for (int i = 4 * fours; i < vectors; i++)
        sum0 += LOAD_W(i) * LOAD_X(i);
    float sum = added((sum0 + sum1) + (sum2 + sum3));
#pragma unroll 1
    for (int k = vectors * VW; k < length; k++)
        sum += w[k * w_k] * x[k];
    c[c_at + batch * c_batch + n * c_n] = BIASED(sum);
}

__kernel __attribute__((reqd_work_group_size(LANES, ROWS, 1)))
void gemv_group(__global const float *restrict w, int w_at, int w_batch, int w_n, int w_k,
                __global const float *restrict x, int x_at, int x_batch, BIAS_PARAMETERS
                __global float *restrict c, int c_at, int c_batch, int c_n, SPLIT_PARAMETERS int N, int K)
{
    __local float meet[ROWS][LANES + 1];
    const int lane = get_local_id(0), line = get_local_id(1), n = get_global_id(1), row = min(n, N - 1);
    FIND_PART
    w += w_at + batch * w_batch + row * w_n + first * w_k;
    x += x_at + batch * x_batch + first;
    const int vectors = length / VW;
    VEC sums = (VEC)(0.0f);
#pragma unroll 1
    for (int i = lane; i < vectors; i += LANES)
        sums += LOAD_W(i) * LOAD_X(i);
    float sum = added(sums);
#pragma unroll 1
    for (int k = vectors * VW + lane; k < length; k += LANES)
        sum += w[k * w_k] * x[k];
    meet[line][lane] = sum;
#pragma unroll 1
    for (int width = LANES / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < width)
            meet[line][lane] += meet[line][lane + width];
    }
    if (lane == 0 && n < N)
        c[c_at + batch * c_batch + n * c_n] = BIASED(meet[line][0]);
}
