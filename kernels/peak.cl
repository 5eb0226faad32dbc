/* How fast the device multiplies and adds when nothing else holds it up: what gemm.cl is measured by.
 *
 * Kernel multiply_add (one item: CHAINS independent vectors, `steps` multiply-adds on each; dimension 0)
 *   out[i] = the sum of its vectors, so that nothing may be left out
 */

#ifndef VW
#define VW 4 /* floats of a vector: 4, 8 or 16 */
#endif
#ifndef CHAINS
#define CHAINS 12 /* as many as hide an instruction's latency */
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define VEC JOIN(float, VW)

__kernel void multiply_add(__global float *restrict out, int out_at, int steps)
{
    const int item = get_global_id(0);
    VEC chain[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; i++)
        chain[i] = (VEC)(0.001f * (float)(item + i));
    const VEC factor = (VEC)(0.999f), term = (VEC)(0.001f);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            chain[i] = chain[i] * factor + term;
    }
    VEC sum = chain[0];
#pragma unroll
    for (int i = 1; i < CHAINS; i++)
        sum += chain[i];
#if VW == 4
    out[out_at + item] = (sum.s0 + sum.s1) + (sum.s2 + sum.s3);
#elif VW == 8
    out[out_at + item] = (sum.s0 + sum.s1) + (sum.s2 + sum.s3) + (sum.s4 + sum.s5) + (sum.s6 + sum.s7);
#else
    const float8 half_ = sum.lo + sum.hi;
    out[out_at + item] = (half_.s0 + half_.s1) + (half_.s2 + half_.s3) + (half_.s4 + half_.s5) + (half_.s6 + half_.s7);
#endif
}
