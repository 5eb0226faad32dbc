/* Random tensors by Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
   the same bits as apps/gradient/philox.py.

       key (seed low, seed high), counter (block low, block high, step low, stream) -> four words per block
       element i is word i % 4 of block i / 4; uniform = upper 24 bits of the word / 2^24

   random    an item per block of four elements

   BERNOULLI  1: out is 1 where the uniform number is below p, else 0 */

#ifndef BERNOULLI
#define BERNOULLI 0
#endif

__kernel void philox(__global const long *seed, int seed_at, __global const long *step, int step_at,
                     __global float *out, int out_at, int count, int stream, float p)
{
    const int block = (int)get_global_id(0), first = 4 * block;
    if (first >= count)
        return;
    const long given = seed[seed_at];
    uint k0 = (uint)given, k1 = (uint)(given >> 32);
    uint4 x = (uint4)((uint)block, 0u, (uint)step[step_at], (uint)stream);
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        const uint low0 = x.x * 0xD2511F53u, high0 = mul_hi(x.x, 0xD2511F53u);
        const uint low1 = x.z * 0xCD9E8D57u, high1 = mul_hi(x.z, 0xCD9E8D57u);
        x = (uint4)(high1 ^ x.y ^ k0, low1, high0 ^ x.w ^ k1, low0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const float4 uniform = convert_float4(x >> 8) * (1.0f / 16777216.0f);
#if BERNOULLI
    const float4 value = select((float4)(0.0f), (float4)(1.0f), uniform < p);
#else
    const float4 value = uniform;
#endif
    __global float *to = out + out_at + first;
    to[0] = value.x;
    if (first + 1 < count)
        to[1] = value.y;
    if (first + 2 < count)
        to[2] = value.z;
    if (first + 3 < count)
        to[3] = value.w;
}
