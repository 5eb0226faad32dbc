/* Random tensors by Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
   the same bits as contract/philox.py.

       key (seed low, seed high), counter (block low, block high, step low, stream) -> four words per block
       element i is word i % 4 of block i / 4; uniform = upper 24 bits of the word / 2^24

   philox    an item per VW blocks of four elements

   Assumed: out starts at a multiple of 4.

   BERNOULLI  1: out is 1 where the uniform number is below p, else 0
   WIDE       1: 32-bit products are made in 64 bits (processors multiply vectors of these), else by mul_hi
   VW         blocks that an item makes at once: 1, 2, 4 or 8 */

#ifndef BERNOULLI
#define BERNOULLI 0
#endif
#ifndef WIDE
#define WIDE 0
#endif
#ifndef VW
#define VW 1
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if VW == 1
#define VECTOR(type) type
#define TO(type) JOIN(convert_, type)
#define WORD(x, k) (x)
#else
#define VECTOR(type) JOIN(type, VW)
#define TO(type) JOIN(JOIN(convert_, type), VW)
#define WORD(x, k) x.s##k
#endif
typedef VECTOR(uint) words;
typedef VECTOR(float) reals;

#if WIDE
#define HIGH(x, factor) TO(uint)((TO(ulong)(x) * (ulong)(factor)) >> 32)
#else
#define HIGH(x, factor) mul_hi(x, (words)(factor))
#endif

#if BERNOULLI
#define DRAWN(u) ((u) < p ? 1.0f : 0.0f)
#else
#define DRAWN(u) (u)
#endif

/* A word's upper 24 bits fit an int, which every device converts exactly. */
#define UNIFORM(x) (TO(float)(TO(int)((x) >> 8)) * (1.0f / 16777216.0f))

/* The four elements of the item's block k, as far as they belong to the tensor. */
static inline void store(float4 value, __global float *to, int left)
{
    if (left >= 4) {
        vstore4(value, 0, to);
    } else if (left > 0) {
        to[0] = value.x;
        if (left > 1)
            to[1] = value.y;
        if (left > 2)
            to[2] = value.z;
    }
}
#define STORE(k) \
    store((float4)(DRAWN(WORD(u0, k)), DRAWN(WORD(u1, k)), DRAWN(WORD(u2, k)), DRAWN(WORD(u3, k))), to + 4 * k, \
          left - 4 * k);

__kernel void philox(__global const long *seed, int seed_at, __global const long *step, int step_at,
                     __global float *out, int out_at, int count, int stream, float p)
{
    const int block = (int)get_global_id(0) * VW, left = count - 4 * block;
    if (left <= 0)
        return;
    const long given = seed[seed_at];
    uint k0 = (uint)given, k1 = (uint)(given >> 32);
#if VW == 1
    words x0 = (uint)block;
#elif VW == 2
    words x0 = (uint2)(0, 1) + (uint)block;
#elif VW == 4
    words x0 = (uint4)(0, 1, 2, 3) + (uint)block;
#else
    words x0 = (uint8)(0, 1, 2, 3, 4, 5, 6, 7) + (uint)block;
#endif
    words x1 = (words)(0u), x2 = (words)((uint)step[step_at]), x3 = (words)((uint)stream);
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        const words low0 = x0 * 0xD2511F53u, high0 = HIGH(x0, 0xD2511F53u);
        const words low1 = x2 * 0xCD9E8D57u, high1 = HIGH(x2, 0xCD9E8D57u);
        x0 = high1 ^ x1 ^ k0;
        x1 = low1;
        x2 = high0 ^ x3 ^ k1;
        x3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const reals u0 = UNIFORM(x0), u1 = UNIFORM(x1), u2 = UNIFORM(x2), u3 = UNIFORM(x3);
    __global float *to = out + out_at + 4 * block;
    STORE(0)
#if VW > 1
    STORE(1)
#endif
#if VW > 2
    STORE(2)
    STORE(3)
#endif
#if VW > 4
    STORE(4)
    STORE(5)
    STORE(6)
    STORE(7)
#endif
}
